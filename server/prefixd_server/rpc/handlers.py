"""From a service of the proto to gRPC handlers: parsing, errors, latencies, in one place.

A service object has one method per RPC, named in snake case, that takes
messages and returns or yields messages, and raises base.errors. Everything
that all methods share is here: the size limit, garbage, lapsed deadlines, the
error table, unexpected exceptions, and metrics.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from prefixd_server.base.errors import DeadlinePassed, InvalidRequest, MessageTooLarge, PrefixdError
from prefixd_server.base.logs import logger
from prefixd_server.base.metrics import Metrics
from prefixd_server.rpc.audit import Audit
from prefixd_server.rpc.status import code_of, internal_error, message_of, trailing_metadata

MESSAGE_BYTES_MAX = 16 << 20
"""Largest message that is read. gRPC's own limit is higher, so that the answer can say the remedy."""
TRANSPORT_BYTES_MAX = 4 * MESSAGE_BYTES_MAX
"""Largest message that gRPC takes in; above it gRPC answers by itself."""

Call: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Requests: TypeAlias = AsyncIterator[Message | PrefixdError]


def service_handler(service: ServiceDescriptor, guards: Mapping[str, Guard]) -> Any:
    """The gRPC handler of one service for one tenant's socket."""
    return grpc_service(service, {name: guard.handler() for name, guard in guards.items()})


def guards_of(
    service: ServiceDescriptor, servicer: object, tenant: str, metrics: Metrics, audit: Audit | None = None
) -> dict[str, Guard]:
    """What stands before each method of one tenant's servicer; `audit` notes every call.

    Raises:
        AttributeError: the servicer lacks a method of the proto.
    """
    return {
        method.name: Guard(method, getattr(servicer, snake_case(method.name)), tenant, metrics, audit)
        for method in service.methods
    }


def grpc_service(service: ServiceDescriptor, handlers: dict[str, Any]) -> Any:
    """gRPC's form of a service, from that of its methods."""
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def grpc_handler(method: MethodDescriptor, behaviour: Callable[..., Any], *, streams_in: bool) -> Any:
    """gRPC's form of a method; its stubs know only the threaded server's.

    Args:
        streams_in: whether the behaviour takes requests one by one, or one that was read before.
    """
    makers: dict[tuple[bool, bool], Any] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return makers[streams_in, method.server_streaming](
        behaviour,
        request_deserializer=_parser(GetMessageClass(method.input_type)),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def snake_case(name: str) -> str:
    """OpenNamespace -> open_namespace."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Guard:
    """What stands between gRPC and one method."""

    def __init__(
        self,
        method: MethodDescriptor,
        call: Callable[..., Any],
        tenant: str,
        metrics: Metrics,
        audit: Audit | None,
    ) -> None:
        self._method = method
        self._call = call
        self._audit = audit
        self._seconds = metrics.rpc_seconds(method.name, tenant)
        self._refusals = Refusals(method.name, tenant, metrics)
        self._awaits = inspect.iscoroutinefunction(call)

    def handler(self) -> Any:
        """gRPC's form of the method."""
        return grpc_handler(self._method, self.behaviour, streams_in=self._method.client_streaming)

    @property
    def behaviour(self) -> Callable[..., Any]:
        """What answers a call: given the request, or where the client streams all of them, and the call."""
        behaviours: dict[tuple[bool, bool], Callable[..., Any]] = {
            (False, False): self._unary,
            (True, False): self._stream_unary,
            (False, True): self._unary_stream,
            (True, True): self._stream_stream,
        }
        return behaviours[self._method.client_streaming, self._method.server_streaming]

    async def _unary(self, request: Message | PrefixdError, call: Call) -> Any:
        work = self._answer(request, call)
        if self._audit is not None:
            work = self._audit.noted(self._method.name, request, call, work)
        return await self._finish(work, call)

    async def _stream_unary(self, requests: Requests, call: Call) -> Any:
        return await self._finish(self._call(_parsed(requests)), call)

    async def _unary_stream(self, request: Message | PrefixdError, call: Call) -> None:
        if self._audit is not None:
            self._audit.opened(self._method.name, request, call)
        await self._finish(self._send(lambda: self._call(_sound(request)), call), call)

    async def _stream_stream(self, requests: Requests, call: Call) -> None:
        if self._audit is not None:
            self._audit.opened(self._method.name, None, call)
        await self._finish(self._send(lambda: self._call(_parsed(requests)), call), call)

    async def _answer(self, request: Message | PrefixdError, call: Call) -> Any:
        remaining_s = call.time_remaining()
        if remaining_s is not None and remaining_s <= 0:
            raise DeadlinePassed(
                "DEADLINE_PASSED", "the deadline had passed before the call began; nothing was done"
            )
        answer = self._call(_sound(request))
        return await answer if self._awaits else answer

    async def _send(self, begin: Callable[[], AsyncIterator[Message]], call: Call) -> None:
        """Writes every answer; whatever happens, the method's own clean-up has run on return."""
        answers = begin()
        try:
            async for answer in answers:
                await call.write(answer)
        finally:
            if inspect.isasyncgen(answers):
                await answers.aclose()

    async def _finish(self, work: Awaitable[Any], call: Call) -> Any:
        began = time.perf_counter()
        try:
            return await work
        except Exception as error:
            return await self._refusals.tell(error, call)
        finally:
            self._seconds.observe(time.perf_counter() - began)


class Refusals:
    """How the calls of one method end that do not go well: counted, logged and told."""

    def __init__(self, method: str, tenant: str, metrics: Metrics) -> None:
        self._method = method
        self._tenant = tenant
        self._metrics = metrics
        self._log = logger("prefixd.rpc").bind(method=method, tenant=tenant)

    async def tell(self, error: Exception, call: Call) -> None:
        """Ends the call with the error's status, by gRPC's own exception.

        The outermost seam for the unexpected.
        """
        told = error if isinstance(error, PrefixdError) else internal_error()
        if told is not error:
            self._log.error("unexpected exception", exc_info=error, **told.metadata)
        else:
            self._log.debug("refused", reason=told.reason, detail=told.message)
        code = code_of(told)
        self._metrics.rpc_error(self._method, self._tenant, code.name, told.reason)
        await call.abort(code, message_of(told), trailing_metadata(told))


def _parser(kind: type[Message]) -> Callable[[bytes], Message | PrefixdError]:
    """Reads a message; returns what is wrong with it, since raising here would tell the caller nothing."""
    from_string = kind.FromString

    def parse(data: bytes) -> Message | PrefixdError:
        if len(data) > MESSAGE_BYTES_MAX:
            return MessageTooLarge(
                "MESSAGE_TOO_LARGE",
                f"the message has {len(data):,} bytes, more than {MESSAGE_BYTES_MAX:,}; send shorter runs, "
                "and a block's bytes in pieces",
                value=len(data),
                limit=MESSAGE_BYTES_MAX,
            )
        try:
            return from_string(data)
        except DecodeError:
            return InvalidRequest(
                "MESSAGE_MALFORMED",
                f"these {len(data):,} bytes are no {kind.DESCRIPTOR.full_name}; generate the client from "
                "prefixd.v1",
            )

    return parse


def _sound(request: Message | PrefixdError) -> Message:
    if isinstance(request, PrefixdError):
        raise request
    return request


async def _parsed(requests: Requests) -> AsyncIterator[Message]:
    async for request in requests:
        yield _sound(request)
