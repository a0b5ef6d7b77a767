"""The way into an address that tenants share: who calls is asked first, then its guard has the call.

A caller that nobody knows is refused before a byte of its request is read, so
that strangers cost no memory; the refusal is counted, and logged where calls
are, like every other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from prefixd_server.base.errors import InvalidRequest, Unauthenticated
from prefixd_server.base.metrics import Metrics
from prefixd_server.rpc.audit import Audit
from prefixd_server.rpc.callers import Callers
from prefixd_server.rpc.handlers import Call, Guard, Refusals, Requests, grpc_handler, grpc_service

NOBODY = ""
"""Tenant of callers that are none, in metrics and logs."""
_MISSING = InvalidRequest(
    "MESSAGE_MALFORMED", "the call carries no message; generate the client from prefixd.v1"
)


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
        """gRPC's form of the method: one that reads nothing before it is asked to."""
        return grpc_handler(self._method, self._serve, streams_in=True)

    async def _serve(self, requests: Requests, call: Call) -> Any:
        guard = await self._guard(call)
        if self._method.client_streaming:
            return await guard.behaviour(requests, call)
        request = await anext(aiter(requests), None)
        return await guard.behaviour(_MISSING if request is None else request, call)

    async def _guard(self, call: Call) -> Guard:
        """The caller's guard; gRPC's own exception ends the call of a stranger."""
        try:
            return self._guards[self._callers.tenant_of(call)]
        except Unauthenticated as refusal:
            if self._audit is not None:
                self._audit.refused(self._method.name, refusal, call)
            await self._refusals.tell(refusal, call)
            raise
