"""rpc/handlers.py, over a real connection, around a service that the test scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.base.accounts import Counters, Stats
from prefixd_server.base.errors import NotFound
from prefixd_server.base.logs import route_to_standard_library
from prefixd_server.base.metrics import Metrics
from prefixd_server.rpc.handlers import (
    MESSAGE_BYTES_MAX,
    TRANSPORT_BYTES_MAX,
    guards_of,
    service_handler,
    snake_case,
)

from tests.support.wire import Refusal, raw_call, refusal_of, short_directory

SERVICE = wire.DESCRIPTOR.services_by_name["CacheService"]
EMPTY = Stats((), Counters(), 0, 0, 0, 0, False, 0.0)


class Scripted:
    """A service whose answers the tests choose."""

    def __init__(self) -> None:
        self.closed = False
        self.lookup_count = 0
        for method in SERVICE.methods:
            if not hasattr(self, snake_case(method.name)):
                setattr(self, snake_case(method.name), self.lookup)

    def lookup(self, request: wire.LookupRequest) -> wire.LookupResponse:
        """Counts."""
        self.lookup_count += 1
        return wire.LookupResponse(miss_block_count=len(request.block_hashes))

    def commit(self, _: wire.CommitRequest) -> wire.CommitResponse:
        """Refuses."""
        raise NotFound("LEASE_UNKNOWN", "no such lease; reserve again")

    async def release(self, _: wire.ReleaseRequest) -> wire.ReleaseResponse:
        """Fails in a way that nobody foresaw."""
        raise ZeroDivisionError("secret detail")

    async def put(self, messages: AsyncIterator[wire.PutRequest]) -> wire.PutResponse:
        """Counts."""
        return wire.PutResponse(stored_count=len([message async for message in messages]))

    async def get(self, request: wire.GetRequest) -> AsyncIterator[wire.GetResponse]:
        """Answers as often as there are hashes, then refuses."""
        try:
            for _ in request.block_hashes:
                yield wire.GetResponse(data=b"x")
            raise NotFound("GONE", "gone; ask again")
        finally:
            self.closed = True

    async def open_session(
        self, messages: AsyncIterator[wire.OpenSessionRequest]
    ) -> AsyncIterator[wire.OpenSessionResponse]:
        """Echoes."""
        async for _ in messages:
            yield wire.OpenSessionResponse(draining=wire.Draining())


class Wire:
    """A raw channel to the scripted service."""

    def __init__(self, channel: grpc.aio.Channel, path: Path, service: Scripted, metrics: Metrics) -> None:
        self.path = path
        self.channel: Any = channel
        self.service = service
        self.metrics = metrics

    async def unary(self, method: str, data: bytes) -> bytes:
        """Calls with raw bytes."""
        answer: bytes = await self.channel.unary_unary(f"/{SERVICE.full_name}/{method}")(data, timeout=10)
        return answer

    def exposed(self) -> str:
        """What the metrics say."""
        return self.metrics.render(EMPTY, {}).decode()


@pytest.fixture
async def connected() -> AsyncIterator[Wire]:
    """The scripted service behind a real socket."""
    route_to_standard_library()
    metrics, service = Metrics(), Scripted()
    with short_directory() as directory:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", TRANSPORT_BYTES_MAX)])
        server.add_generic_rpc_handlers(
            (service_handler(SERVICE, guards_of(SERVICE, service, "tenant", metrics)),)
        )
        server.add_insecure_port(f"unix:{directory}/s")
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{directory}/s") as channel:
            yield Wire(channel, directory / "s", service, metrics)
        await server.stop(None)


async def refused(connected: Wire, method: str, data: bytes) -> Refusal:
    """How a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await connected.unary(method, data)
    return refusal_of(caught.value)


async def test_a_call_is_parsed_answered_and_timed(connected: Wire) -> None:
    answer = await connected.unary(
        "Lookup", wire.LookupRequest(block_hashes=[b"a", b"b"]).SerializeToString()
    )
    assert wire.LookupResponse.FromString(answer).miss_block_count == 2
    assert 'prefixd_rpc_seconds_count{method="Lookup",tenant="tenant"} 1.0' in connected.exposed()


async def test_a_refusal_carries_code_reason_and_remedy_and_is_counted(connected: Wire) -> None:
    refusal = await refused(connected, "Commit", b"")
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "LEASE_UNKNOWN")
    assert "reserve again" in refusal.message
    counted = (
        'prefixd_rpc_errors_total{code="NOT_FOUND",method="Commit",reason="LEASE_UNKNOWN",tenant="tenant"}'
    )
    assert f"{counted} 1.0" in connected.exposed()


async def test_the_unexpected_is_an_id_on_the_wire_and_a_traceback_in_the_log(
    connected: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = await refused(connected, "Release", b"")
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in refusal.message
    logged = caplog.text
    assert refusal.metadata["error_id"] in logged
    assert "secret detail" in logged


async def test_garbage_is_refused_as_garbage(connected: Wire) -> None:
    refusal = await refused(connected, "Lookup", b"\xff" * 40)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_MALFORMED")


async def test_a_string_that_is_no_utf8_is_garbage(connected: Wire) -> None:
    refusal = await refused(connected, "OpenNamespace", b"\x0a\x04\x0a\x02\xff\xfe")
    assert refusal.reason == "MESSAGE_MALFORMED"


async def test_a_message_over_the_limit_is_told_the_remedy(connected: Wire) -> None:
    refusal = await refused(connected, "Lookup", b"\0" * (MESSAGE_BYTES_MAX + 1))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    assert "send shorter runs" in refusal.message
    assert refusal.retry_after_s is None


async def test_a_message_over_the_transport_limit_is_refused_by_grpc_itself(connected: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await connected.unary("Lookup", b"\0" * (TRANSPORT_BYTES_MAX + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_client_stream_is_counted_and_garbage_in_it_refused(connected: Wire) -> None:
    put = connected.channel.stream_unary(f"/{SERVICE.full_name}/Put")
    assert wire.PutResponse.FromString(await put(iter([b"", b""]))).stored_count == 2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await put(iter([b"", b"\xff\xff"]))
    assert refusal_of(caught.value).reason == "MESSAGE_MALFORMED"


async def test_an_error_in_the_middle_of_a_server_stream_ends_it_with_its_status(connected: Wire) -> None:
    get = connected.channel.unary_stream(f"/{SERVICE.full_name}/Get")
    call = get(wire.GetRequest(block_hashes=[b"", b""]).SerializeToString())
    for _ in range(2):
        assert wire.GetResponse.FromString(await call.read()).data == b"x"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert refusal_of(caught.value).reason == "GONE"
    assert connected.service.closed


async def test_both_halves_of_a_bidirectional_stream_flow(connected: Wire) -> None:
    session = connected.channel.stream_stream(f"/{SERVICE.full_name}/OpenSession")
    answers = [answer async for answer in session(iter([b"", b"", b""]))]
    assert len(answers) == 3


def call_synchronously(path: Path, timeout_s: float) -> grpc.StatusCode:
    """A lookup over a channel of its own, in a thread of its own."""
    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            raw: Any = channel.unary_unary
            raw(f"/{SERVICE.full_name}/Lookup")(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


async def test_a_deadline_of_zero_is_exceeded_and_nothing_is_done(connected: Wire) -> None:
    answer = await asyncio.to_thread(raw_call, connected.path, f"/{SERVICE.full_name}/Lookup", "0m")
    assert answer
    await connected.unary("Lookup", b"")
    assert connected.service.lookup_count == 1


async def test_a_call_whose_deadline_passed_while_the_loop_was_busy_is_not_carried_out(
    connected: Wire,
) -> None:
    call = asyncio.get_running_loop().run_in_executor(None, call_synchronously, connected.path, 0.1)
    # The step that holds the loop too long is what is tested.
    time.sleep(0.3)
    assert await call is grpc.StatusCode.DEADLINE_EXCEEDED
    await connected.unary("Lookup", b"")
    assert connected.service.lookup_count == 1


def test_a_service_that_lacks_a_method_is_noticed_at_start() -> None:
    with pytest.raises(AttributeError):
        guards_of(SERVICE, object(), "tenant", Metrics())
