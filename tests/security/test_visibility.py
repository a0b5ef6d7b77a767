"""What the standard services tell: health and reflection to every tenant, connections to operators alone."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prefixd_server.rpc.server import CHANNELZ_NAME, SERVICE_NAMES

from tests.support.daemon import running_daemon

OPTIONS = [("grpc.enable_http_proxy", 0)]


async def seen(address: str) -> tuple[set[str], bool, bool]:
    """(services that reflection lists, whether health says SERVING, whether channelz answers)."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in reflection.ServerReflectionInfo(iter([request]))]
        services = {service.name for service in answers[0].list_services_response.service}
        health: Any = health_pb2_grpc.HealthStub(channel)
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        connections: Any = channelz_pb2_grpc.ChannelzStub(channel).GetServers
        call = connections(channelz_pb2.GetServersRequest())
        code = await call.code()
        assert code in {grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED}
        serving = status == health_pb2.HealthCheckResponse.SERVING
        return services, serving, code is grpc.StatusCode.OK


@pytest.mark.parametrize(("further", "operator"), [("bob", False), ("bob,admin=true", True)])
async def test_connections_of_the_process_are_shown_on_admin_sockets_alone(
    further: str, operator: bool
) -> None:
    async with running_daemon(further, listen="127.0.0.1:0") as daemon:
        everybody, operators = set(SERVICE_NAMES), {*SERVICE_NAMES, CHANNELZ_NAME}
        first, second = (tenant.socket for tenant in daemon.config.all_tenants)
        assert await seen(f"unix:{first}") == (operators, True, True)
        assert await seen(f"unix:{second}") == (operators if operator else everybody, True, operator)
        assert await seen(f"127.0.0.1:{daemon.ports['listen']}") == (everybody, True, False)
