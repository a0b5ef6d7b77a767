"""Tenants on the TCP address: each door is open to the right caller and closed to the wrong one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prefixd.v1 import admin_service_pb2, admin_service_pb2_grpc, types_pb2
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.config_sources import load_config
from prefixd_server.base.errors import ConfigError
from prefixd_server.rpc.namespace_spec import spec_to_wire

from tests.support.certificates import Authority, Certificate
from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.specs import spec
from tests.support.wire import Refusal, refusal_of
from tests.support.wire_engine import WireEngine, put_messages

ALICE, BOB = "alice-" * 8, "bob-" * 8
HASHES = chain("a", "b")
BLOCKS = [b"x" * 4096, b"y" * 4096]


def bearer(token: str, scheme: str = "Bearer") -> tuple[tuple[str, str], ...]:
    """Metadata that shows a token."""
    return (("authorization", f"{scheme} {token}"),)


@dataclass
class Town:
    """A daemon on TCP with two further tenants, and what it takes to knock."""

    daemon: Daemon
    ours: Authority | None = None

    def channel(self, show: Certificate | None = None) -> Any:
        """A channel, by TLS where there is an authority."""
        address = f"localhost:{self.daemon.ports['listen']}"
        options = [("grpc.enable_http_proxy", 0)]
        if self.ours is None:
            return grpc.aio.insecure_channel(address, options=options)
        pair: dict[str, Any] = {}
        if show is not None:
            pair = {"private_key": show.key.read_bytes(), "certificate_chain": show.certificate.read_bytes()}
        credentials = grpc.ssl_channel_credentials(self.ours.certificate.read_bytes(), **pair)
        return grpc.aio.secure_channel(address, credentials, options=options)

    async def namespaces(
        self, metadata: tuple[tuple[str, str], ...] = (), show: Certificate | None = None
    ) -> int | Refusal:
        """How many namespaces the caller's tenant has; tenants have 0 (default), 1 (alice) and 2 (bob)."""
        async with self.channel(show) as channel:
            stub: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
            try:
                answer = await stub.ListNamespaces(
                    admin_service_pb2.ListNamespacesRequest(), metadata=metadata, timeout=10
                )
            except grpc.aio.AioRpcError as error:
                return refusal_of(error)
        return len(answer.namespaces)

    async def reason(self, *arguments: Any, **more: Any) -> tuple[grpc.StatusCode, str]:
        """How a call is refused."""
        refusal = await self.namespaces(*arguments, **more)
        assert isinstance(refusal, Refusal), f"let in as the tenant with {refusal} namespaces"
        return refusal.code, refusal.reason


def populate(daemon: Daemon) -> None:
    """One namespace for alice, two for bob."""
    for tenant, count in (("alice", 1), ("bob", 2)):
        for number in range(count):
            daemon.cache.open_namespace(tenant, spec(f"model-{number}"))


def secret(directory: Path, name: str, token: str) -> str:
    """A token file."""
    path = directory / f"{name}.token"
    path.write_text(token + "\n")
    path.chmod(0o600)
    return str(path)


MISSING = (grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS_MISSING")
UNKNOWN = (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_UNKNOWN")
DISAGREE = (grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS_DISAGREE")


@pytest.fixture
async def tokens(tmp_path: Path) -> AsyncIterator[Town]:
    """Plain TCP on loopback; alice and bob have tokens."""
    tenants = [f"alice,token_file={secret(tmp_path, 'alice', ALICE)}"]
    tenants.append(f"bob,token_file={secret(tmp_path, 'bob', BOB)}")
    async with running_daemon(*tenants, listen="127.0.0.1:0") as daemon:
        populate(daemon)
        yield Town(daemon)


@pytest.fixture
async def certificates(tmp_path: Path) -> AsyncIterator[Town]:
    """Mutual TLS; alice and bob by certificate, bob by token, too."""
    ours = Authority(tmp_path, "ours")
    server = ours.issue("server")
    flags = {
        "tls__certificate": server.certificate,
        "tls__key": server.key,
        "tls__client_ca": ours.certificate,
    }
    tenants = ["alice,certificate_names=alice.engines"]
    tenants.append(f"bob,certificate_names=bob,token_file={secret(tmp_path, 'bob', BOB)}")
    settings = {name: str(value) for name, value in flags.items()}
    async with running_daemon(*tenants, listen="127.0.0.1:0", **settings) as daemon:
        populate(daemon)
        yield Town(daemon, ours)


async def test_a_token_opens_its_tenants_door_and_no_other(tokens: Town) -> None:
    assert await tokens.namespaces(bearer(ALICE)) == 1
    assert await tokens.namespaces(bearer(BOB, "bearer")) == 2


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), MISSING),
        (bearer("x" * 32), UNKNOWN),
        (bearer(ALICE[:-1]), UNKNOWN),
        (bearer(""), UNKNOWN),
        (bearer(ALICE, "Basic"), UNKNOWN),
        ((("authorization", ALICE),), UNKNOWN),
        (bearer(ALICE) + bearer(BOB), UNKNOWN),
        ((("token", ALICE),), MISSING),
    ],
)
async def test_without_a_known_token_no_door_opens(
    tokens: Town, metadata: tuple[tuple[str, str], ...], reason: tuple[grpc.StatusCode, str]
) -> None:
    assert await tokens.reason(metadata) == reason


async def test_every_kind_of_call_is_closed_to_strangers_and_open_to_the_tenant(tokens: Town) -> None:
    async with tokens.channel() as channel:
        stranger = WireEngine(channel)
        ref = types_pb2.NamespaceRef(fingerprint=b"f" * 32)
        watch = admin_service_pb2.WatchEventsRequest()
        get = wire.GetRequest(namespace=ref, block_hashes=HASHES)
        put = put_messages(ref, HASHES, BLOCKS)

        async def drained(stream: Any) -> list[Any]:
            return [message async for message in stream]

        for attempt in (
            lambda: stranger.cache.OpenNamespace(wire.OpenNamespaceRequest(spec=spec_to_wire(spec()))),
            lambda: stranger.cache.Put(iter(put)),
            lambda: drained(stranger.cache.Get(get)),
            lambda: drained(stranger.cache.OpenSession(iter([wire.OpenSessionRequest()]))),
            lambda: drained(stranger.admin.WatchEvents(watch)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await attempt()
            assert (refused.value.code(), refusal_of(refused.value).reason) == MISSING
        metadata = bearer(ALICE)
        request = wire.OpenNamespaceRequest(spec=spec_to_wire(spec(block_bytes=4096)))
        mine = (await stranger.cache.OpenNamespace(request, metadata=metadata)).namespace
        put = put_messages(mine, HASHES, BLOCKS)
        assert (await stranger.cache.Put(iter(put), metadata=metadata)).stored_count == 2
        get = wire.GetRequest(namespace=mine, block_hashes=HASHES)
        messages = [message async for message in stranger.cache.Get(get, metadata=metadata)]
        assert [message.block.data for message in messages[1:]] == BLOCKS
    assert [len(tokens.daemon.cache.list_namespaces(name)) for name in ("default", "alice", "bob")] == [
        0,
        2,
        2,
    ]


async def test_a_stranger_is_refused_before_a_byte_of_the_request_is_read(tokens: Town) -> None:
    async with tokens.channel() as channel:
        lookup: Any = channel.stream_unary("/prefixd.v1.CacheService/Lookup")
        silent = lookup(timeout=20)
        assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED
        known = lookup(timeout=20, metadata=bearer(ALICE))
        await known.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await known
        assert refusal_of(refused.value).reason == "MESSAGE_MALFORMED"


async def test_a_stranger_is_counted_and_an_admin_call_of_one_is_in_the_audit_log(
    tokens: Town, caplog: pytest.LogCaptureFixture
) -> None:
    await tokens.reason(bearer("x" * 32))
    (line,) = [record for record in caplog.records if record.name == "prefixd.audit"]
    assert line.levelname == "WARNING"
    assert {"TOKEN_UNKNOWN", "ListNamespaces"} <= set(line.msg.values())
    assert "127.0.0.1" in line.msg["peer"].replace("%3A", ":")
    assert "x" * 32 not in caplog.text
    scraped = (await tokens.daemon._render_metrics()).decode()
    assert 'reason="TOKEN_UNKNOWN",tenant=""' in scraped


async def test_no_caller_by_tcp_concerns_the_whole_daemon(tokens: Town) -> None:
    async with tokens.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await WireEngine(channel).admin.Check(admin_service_pb2.CheckRequest(), metadata=bearer(ALICE))
    assert refusal_of(refused.value).reason == "ADMIN_REQUIRED"


async def test_a_certificate_opens_the_door_of_the_tenant_that_it_names(certificates: Town) -> None:
    ours = certificates.ours
    assert ours is not None
    alice = ours.issue("a", alternatives="DNS:somewhere,DNS:alice.engines")
    assert await certificates.namespaces(show=alice) == 1
    assert await certificates.namespaces(show=ours.issue("bob", alternatives="")) == 2


async def test_a_certificate_of_our_authority_with_another_name_opens_none(certificates: Town) -> None:
    ours = certificates.ours
    assert ours is not None
    for name, alternatives in (("carol", ""), ("bob", "DNS:carol"), ("x", "DNS:alice.engines.evil")):
        assert await certificates.reason(show=ours.issue(name, alternatives=alternatives)) == MISSING
    both = ours.issue("both", alternatives="DNS:alice.engines,DNS:bob")
    assert await certificates.reason(show=both) == DISAGREE
    assert (await certificates.reason(bearer(BOB)))[0] is grpc.StatusCode.UNAVAILABLE


async def test_certificate_and_token_must_be_of_one_tenant(certificates: Town) -> None:
    ours = certificates.ours
    assert ours is not None
    alice, bob = ours.issue("a", alternatives="DNS:alice.engines"), ours.issue("bob", alternatives="")
    assert await certificates.namespaces(bearer(BOB), show=bob) == 2
    assert await certificates.namespaces(bearer(BOB), show=ours.issue("plain")) == 2
    assert await certificates.reason(bearer(BOB), show=alice) == DISAGREE
    assert await certificates.reason(bearer(ALICE), show=alice) == UNKNOWN


async def test_tokens_over_tls_need_no_certificate_of_the_caller(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    server = ours.issue("server")
    settings = {"tls__certificate": str(server.certificate), "tls__key": str(server.key)}
    tenant = f"alice,token_file={secret(tmp_path, 'alice', ALICE)}"
    async with running_daemon(tenant, listen="127.0.0.1:0", **settings) as daemon:
        daemon.cache.open_namespace("alice", spec())
        town = Town(daemon, ours)
        assert await town.namespaces(bearer(ALICE)) == 1
        assert await town.reason() == MISSING


TOKEN_TENANT = "name=t,socket=/run/t.sock,token_file=/etc/t"
NAMED_TENANT = "name=t,socket=/run/t.sock,certificate_names=t"
TLS = {"tls.certificate": "c", "tls.key": "k"}
CA = {"tls.client_ca": "a"}


@pytest.mark.parametrize(
    ("flags", "tenants", "complaint"),
    [
        ({}, [], "loopback"),
        ({}, [TOKEN_TENANT], "loopback"),
        (TLS, [], "loopback"),
        (TLS, [NAMED_TENANT], "loopback"),
        (TLS | {"listen": "127.0.0.1:1"}, [NAMED_TENANT], r"certificate_names = t: needs tls\.client_ca"),
        (
            TLS | CA,
            [NAMED_TENANT, NAMED_TENANT.replace("name=t,socket=/run/t", "name=u,socket=/run/u")],
            "differ",
        ),
        (TLS, [TOKEN_TENANT], None),
        (TLS | CA, [], None),
        (TLS | CA, [NAMED_TENANT, TOKEN_TENANT.replace("t,socket=/run/t", "u,socket=/run/u")], None),
        (TLS | {"token_file": "/etc/first"}, [], None),
    ],
)
def test_beyond_loopback_the_daemon_listens_only_by_tls_to_callers_that_can_be_known(
    flags: dict[str, str], tenants: list[str], complaint: str | None
) -> None:
    flags = {"socket": "/run/p.sock", "listen": "0.0.0.0:1"} | flags
    if complaint is None:
        assert load_config(flags=flags, tenants=tenants).server.listen == "0.0.0.0:1"
    else:
        with pytest.raises(ConfigError, match=complaint):
            load_config(flags=flags, tenants=tenants)


async def test_a_token_file_that_cannot_be_used_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    path = secret(tmp_path, "alice", ALICE)
    Path(path).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 0600"):
        async with running_daemon(f"alice,token_file={path}", listen="127.0.0.1:0"):
            pass
