"""One gRPC server per address: our two services, health, reflection, and channelz for operators.

A unix socket is one tenant's; on the TCP address callers say who they are.
channelz knows every connection of the process, so it is served on admin
sockets alone.

A socket is published, renamed into place with its mode and group, only once
its server answers. Which sockets there are is app/daemon.py's to know.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import grpc.aio
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prefixd.v1 import admin_service_pb2, cache_service_pb2

from prefixd_server.base.config import LeaseConfig
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.metrics import Metrics
from prefixd_server.base.types import Tier
from prefixd_server.cache.cache import Cache
from prefixd_server.rpc.admin_service import AdminService, Ends
from prefixd_server.rpc.audit import Audit
from prefixd_server.rpc.cache_service import CacheService
from prefixd_server.rpc.callers import Callers
from prefixd_server.rpc.door import shared_handler
from prefixd_server.rpc.handlers import TRANSPORT_BYTES_MAX, guards_of, service_handler
from prefixd_server.rpc.reflection import SERVICE_NAME as REFLECTION_NAME
from prefixd_server.rpc.reflection import serve_reflection
from prefixd_server.rpc.seat import Seat, staging_directory
from prefixd_server.rpc.sockets import publish

CALLS_BESIDE_SESSIONS_MAX = 1024
"""Calls in progress on one socket, sessions apart; beyond it gRPC answers RESOURCE_EXHAUSTED."""
_ADMIN_SERVICE = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
_OUR_SERVICES = (cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"], _ADMIN_SERVICE)
SERVICE_NAMES = (*(service.full_name for service in _OUR_SERVICES), health.SERVICE_NAME, REFLECTION_NAME)
CHANNELZ_NAME = "grpc.channelz.v1.Channelz"
# The stubs of these packages know only their threaded halves.
_HEALTH = cast(Any, health).aio
_ADD_CHANNELZ: Any = channelz.add_channelz_servicer
_OPTIONS = (
    ("grpc.max_receive_message_length", TRANSPORT_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_channelz", 1),
    # Clients may ping as they like: a ping costs less than a reconnect.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)


class WireServer:
    """The server of one address.

    Args:
        seats: of the tenants there; a unix socket has one.
        callers: tells them apart; None where there is one.
    """

    def __init__(
        self,
        cache: Cache,
        seats: Sequence[Seat],
        limits: LeaseConfig,
        ends: Ends,
        metrics: Metrics,
        callers: Callers | None = None,
    ) -> None:
        assert callers is not None or len(seats) == 1, "nobody could tell the tenants apart"
        self._service_names = (*SERVICE_NAMES, CHANNELZ_NAME) if seats[0].admin else SERVICE_NAMES
        self._directory_fd = -1
        self._health: Any = _HEALTH.HealthServicer()
        self._server = grpc.aio.server(
            options=_OPTIONS, maximum_concurrent_rpcs=limits.session_count_max + CALLS_BESIDE_SESSIONS_MAX
        )
        for service in _OUR_SERVICES:
            audited = service is _ADMIN_SERVICE
            guards = {}
            for seat in seats:
                servicer = AdminService(cache, seat, ends) if audited else CacheService(cache, seat, limits)
                audit = Audit(seat.tenant) if audited else None
                guards[seat.tenant] = guards_of(service, servicer, seat.tenant, metrics, audit)
            if callers is None:
                handler = service_handler(service, guards[seats[0].tenant])
            else:
                handler = shared_handler(service, callers, guards, metrics, audited=audited)
            self._server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        serve_reflection(self._service_names, self._server)
        if CHANNELZ_NAME in self._service_names:
            _ADD_CHANNELZ(self._server)

    async def open_unix(self, path: Path, mode: int, group: str) -> None:
        """Listens on a unix socket; the caller holds its lock. Raises ConfigError."""
        private = staging_directory(path)
        private.mkdir(mode=0o700)
        self._directory_fd = os.open(private, os.O_RDONLY | os.O_DIRECTORY)
        # Through the descriptor, so that the path's length and characters do not matter.
        await self._listen(f"unix:/proc/self/fd/{self._directory_fd}/s", "socket", path)
        publish(private / "s", path, mode, group)
        private.rmdir()

    async def open_tcp(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Listens on HOST:PORT, by TLS with credentials, and returns the port. Raises ConfigError."""
        return await self._listen(address, "listen", address, credentials)

    async def set_serving(self, serving: bool) -> None:
        """What health answers, for the whole server and for each service."""
        states = health_pb2.HealthCheckResponse.ServingStatus
        state = states.Value("SERVING" if serving else "NOT_SERVING")
        for name in ("", *self._service_names):
            await self._health.set(name, state)

    async def set_tier_serving(self, tier: Tier, serving: bool) -> None:
        """What health answers for one tier, as a service of its own: "prefixd.tier.nvme"."""
        states = health_pb2.HealthCheckResponse.ServingStatus
        state = states.Value("SERVING" if serving else "NOT_SERVING")
        await self._health.set(f"prefixd.tier.{tier.name.lower()}", state)

    async def stop(self, grace_s: float) -> None:
        """Ends at most `grace_s` later, cancelling calls still in progress. The path is the caller's."""
        await self._server.stop(grace_s)
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    async def _listen(
        self, address: str, key: str, shown: object, credentials: grpc.ServerCredentials | None = None
    ) -> int:
        await self.set_serving(False)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                "CANNOT_LISTEN",
                f"{key} = {shown}: cannot listen there ({error}); free the address or choose another",
                key=key,
                value=shown,
            ) from error
        await self._server.start()
        return port
