"""The way into an address that tenants share: who calls is asked first, then its guard has the call.

A caller that nobody knows is refused before its request is looked at, and the
refusal is counted, and logged where calls are, like every other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from prefixd_server.base.errors import PrefixdError, Unauthenticated
from prefixd_server.base.metrics import Metrics
from prefixd_server.rpc.audit import Audit
from prefixd_server.rpc.callers import Callers
from prefixd_server.rpc.handlers import Call, Guard, Refusals, Requests, grpc_handler, grpc_service

NOBODY = ""
"""Tenant of callers that are none, in metrics and logs."""


def shared_handler(
    service: ServiceDescriptor,
    callers: Callers,
    tenants: Mapping[str, Mapping[str, Guard]],
    metrics: Metrics,
    *,
    audited: bool,
) -> Any:
    """The gRPC handler of one service for an address where callers say who they are.

    Args:
        tenants: each tenant's guards, by method.
        audited: whether the audit log is to tell who was refused.
    """
    handlers = {}
    for method in service.methods:
        guards = {tenant: guards[method.name] for tenant, guards in tenants.items()}
        refusals = Refusals(method.name, NOBODY, metrics)
        audit = Audit(NOBODY) if audited else None
        handlers[method.name] = _Door(method, callers, guards, refusals, audit).handler()
    return grpc_service(service, handlers)


class _Door:
    """What stands before the guards of one method."""

    def __init__(
        self,
        method: MethodDescriptor,
        callers: Callers,
        guards: Mapping[str, Guard],
        refusals: Refusals,
        audit: Audit | None,
    ) -> None:
        self._method = method
        self._callers = callers
        self._guards = guards
        self._refusals = refusals
        self._audit = audit

    def handler(self) -> Any:
        """gRPC's form of the method."""
        return grpc_handler(
            self._method, self._unary, self._stream_unary, self._unary_stream, self._stream_stream
        )

    async def _unary(self, request: Message | PrefixdError, call: Call) -> Any:
        return await (await self._guard(call)).unary(request, call)

    async def _stream_unary(self, requests: Requests, call: Call) -> Any:
        return await (await self._guard(call)).stream_unary(requests, call)

    async def _unary_stream(self, request: Message | PrefixdError, call: Call) -> None:
        await (await self._guard(call)).unary_stream(request, call)

    async def _stream_stream(self, requests: Requests, call: Call) -> None:
        await (await self._guard(call)).stream_stream(requests, call)

    async def _guard(self, call: Call) -> Guard:
        """The caller's guard; gRPC's own exception ends the call of a stranger."""
        try:
            return self._guards[self._callers.tenant_of(call)]
        except Unauthenticated as refusal:
            if self._audit is not None:
                self._audit.refused(self._method.name, refusal, call)
            await self._refusals.tell(refusal, call)
            raise
