"""rpc/probes.py: health over TCP, and nothing else there."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prefixd.v1 import admin_service_pb2, admin_service_pb2_grpc
from prefixd_server.base.config_sources import load_config
from prefixd_server.base.errors import ConfigError
from prefixd_server.rpc.probes import LIVE

from tests.support.daemon import running_daemon

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(port: int, service: str) -> int:
    """What a probe gets."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
        return int(answer.status)


async def test_ready_ends_with_a_drain_and_live_does_not() -> None:
    async with running_daemon(probes="127.0.0.1:0") as daemon:
        port = daemon.ports["probes"]
        assert (await health(port, ""), await health(port, LIVE)) == (SERVING, SERVING)
        await daemon.drain(0)
        assert (await health(port, ""), await health(port, LIVE)) == (NOT_SERVING, SERVING)


async def test_nothing_but_health_is_served_there() -> None:
    async with (
        running_daemon(probes="127.0.0.1:0") as daemon,
        grpc.aio.insecure_channel(f"127.0.0.1:{daemon.ports['probes']}") as channel,
    ):
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetStats(admin_service_pb2.GetStatsRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with running_daemon(probes="127.0.0.1:0") as daemon:
        with pytest.raises(ConfigError, match="cannot listen there"):
            async with running_daemon(probes=f"127.0.0.1:{daemon.ports['probes']}"):
                pass


def test_probes_and_exposed_metrics_may_leave_the_machine_and_nothing_else_may() -> None:
    flags = {"socket": "/run/p.sock", "probes": "0.0.0.0:1", "metrics": "0.0.0.0:2"}
    assert load_config(flags=flags | {"metrics_exposed": "true"}).server.metrics == "0.0.0.0:2"
    with pytest.raises(ConfigError, match="metrics_exposed = true"):
        load_config(flags=flags)
    with pytest.raises(ConfigError, match="loopback"):
        load_config(flags={"socket": "/run/p.sock", "listen": "0.0.0.0:1", "metrics_exposed": "true"})
