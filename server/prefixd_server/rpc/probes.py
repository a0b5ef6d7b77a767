"""Health alone, on a TCP address: for probes of an orchestrator, which cannot reach a unix socket.

Nothing else is served there, so that nothing but "serving or not" can be
learned or done by whoever reaches the port.
"""

from __future__ import annotations

from typing import Any, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixd_server.base.errors import ConfigError

LIVE = "live"
"""A service that is SERVING as long as the loop answers, also during a drain: for liveness probes."""
CALLS_MAX = 64
_STATES = health_pb2.HealthCheckResponse.ServingStatus
# The stubs of this package know only its threaded half.
_HEALTH = cast(Any, health).aio


class ProbeServer:
    """Answers grpc.health.v1 for "" (ready) and LIVE."""

    def __init__(self) -> None:
        self._health: Any = _HEALTH.HealthServicer()
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),), maximum_concurrent_rpcs=CALLS_MAX)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def open(self, address: str) -> int:
        """Listens on HOST:PORT and returns the port. Raises ConfigError."""
        await self.set_serving(False)
        await self._health.set(LIVE, _STATES.Value("SERVING"))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                "CANNOT_LISTEN",
                f"probes = {address}: cannot listen there ({error}); free the address or choose another",
                key="probes",
                value=address,
            ) from error
        await self._server.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        """What "" answers."""
        await self._health.set("", _STATES.Value("SERVING" if serving else "NOT_SERVING"))

    async def stop(self) -> None:
        """Ends at once."""
        await self._server.stop(None)
