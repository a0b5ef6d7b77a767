"""rpc/tls.py: the TCP address is closed to the wrong caller and open to the right one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from prefixd.v1 import admin_service_pb2, admin_service_pb2_grpc
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.config_sources import load_config
from prefixd_server.base.errors import ConfigError

from tests.support.certificates import Authority, Certificate
from tests.support.daemon import running_daemon


@dataclass(frozen=True)
class Door:
    """A daemon that asks for certificates of `ours`, and what it takes to knock."""

    daemon: Daemon
    server: Certificate
    ours: Authority
    theirs: Authority

    async def knock(self, trust: Authority, show: Certificate | None) -> grpc.StatusCode:
        """How a call ends that trusts an authority and shows a certificate."""
        pair: dict[str, Any] = {}
        if show is not None:
            pair = {"private_key": show.key.read_bytes(), "certificate_chain": show.certificate.read_bytes()}
        credentials = grpc.ssl_channel_credentials(trust.certificate.read_bytes(), **pair)
        return await called(grpc.aio.secure_channel(f"localhost:{self.daemon.ports['listen']}", credentials))


async def called(channel: Any) -> grpc.StatusCode:
    """How a call on a channel ends."""
    async with channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        try:
            await stub.GetStats(admin_service_pb2.GetStatsRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def settings(server: Certificate, client_ca: Path | None) -> dict[str, str]:
    """Flags of a daemon with TLS."""
    files = {"tls__certificate": str(server.certificate), "tls__key": str(server.key)}
    return files | ({} if client_ca is None else {"tls__client_ca": str(client_ca)})


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    """See Door."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server = ours.issue("server")
    async with running_daemon(listen="127.0.0.1:0", **settings(server, ours.certificate)) as daemon:
        yield Door(daemon, server, ours, theirs)


async def test_a_caller_with_our_certificate_is_let_in(door: Door) -> None:
    assert await door.knock(door.ours, door.ours.issue("engine")) is grpc.StatusCode.OK


async def test_a_caller_without_a_certificate_or_with_another_authority_s_is_not(door: Door) -> None:
    assert await door.knock(door.ours, None) is grpc.StatusCode.UNAVAILABLE
    assert await door.knock(door.ours, door.theirs.issue("stranger")) is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_that_does_not_know_our_authority_does_not_trust_the_daemon(door: Door) -> None:
    assert await door.knock(door.theirs, door.ours.issue("engine")) is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_without_tls_is_not_let_in(door: Door) -> None:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{door.daemon.ports['listen']}")
    assert await called(channel) is grpc.StatusCode.UNAVAILABLE


async def test_a_renewed_certificate_is_used_without_a_restart(door: Door) -> None:
    engine = door.theirs.issue("engine")
    renewed = door.theirs.issue("renewed")
    assert await door.knock(door.theirs, engine) is grpc.StatusCode.UNAVAILABLE
    shutil.copy(renewed.key, door.server.key)
    shutil.copy(renewed.certificate, door.server.certificate)
    shutil.copy(door.theirs.certificate, door.ours.certificate)
    assert await door.knock(door.theirs, engine) is grpc.StatusCode.OK


async def test_a_broken_renewal_leaves_what_was_in_force(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    engine = door.ours.issue("engine")
    trusted = door.ours.certificate.read_bytes()
    door.server.certificate.write_text("half a fi")
    assert await door.knock(door.ours, engine) is grpc.StatusCode.OK
    assert "TLS_UNUSABLE" in caplog.text
    assert trusted == door.ours.certificate.read_bytes()


async def test_without_client_authorities_tls_is_for_loopback(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    server = ours.issue("server")
    async with running_daemon(listen="127.0.0.1:0", **settings(server, None)) as daemon:
        assert await Door(daemon, server, ours, ours).knock(ours, None) is grpc.StatusCode.OK
    flags = {"socket": "/run/p.sock", "listen": "0.0.0.0:1"}
    with pytest.raises(ConfigError, match=r"tls\.client_ca"):
        load_config(flags=flags | {"tls.certificate": "c", "tls.key": "k"})
    assert load_config(flags=flags | {"tls.certificate": "c", "tls.key": "k", "tls.client_ca": "a"})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"tls.certificate": "c"}, r"tls\.key"),
        ({"tls.key": "k"}, r"tls\.certificate"),
        ({"tls.client_ca": "a"}, r"needs tls\.certificate"),
    ],
)
def test_half_a_configuration_is_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(flags={"socket": "/run/p.sock", **given})


@pytest.mark.parametrize("fault", ["missing", "garbage", "another key", "open key"])
async def test_files_that_cannot_be_used_keep_the_daemon_from_starting(tmp_path: Path, fault: str) -> None:
    ours = Authority(tmp_path, "ours")
    server, other = ours.issue("server"), ours.issue("other")
    match fault:
        case "missing":
            server.certificate.unlink()
        case "garbage":
            server.certificate.write_text("no certificate")
        case "another key":
            shutil.copy(other.key, server.key)
        case _:
            server.key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls\.certificate = ") as refused:
        async with running_daemon(listen="127.0.0.1:0", **settings(server, ours.certificate)):
            await asyncio.sleep(0)
    assert refused.value.reason == "TLS_UNUSABLE"
