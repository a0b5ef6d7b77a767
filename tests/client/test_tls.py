"""The client over TLS: it puts and gets with a certificate, and is a miss without."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefixd_client import AsyncClient, Client, ClientOptions, ClientTls
from prefixd_client.errors import InvalidArgument

from tests.support.certificates import Authority
from tests.support.clients import PATIENT, data_of, is_ready, run_of, spec, until
from tests.support.daemon import DaemonProcess
from tests.support.ports import free_port
from tests.support.wire import short_directory


@dataclass(frozen=True)
class Remote:
    """A daemon that asks for certificates, and an authority whose certificates it takes."""

    address: str
    ours: Authority

    def tls(self) -> ClientTls:
        """What an engine of ours holds."""
        engine = self.ours.issue("engine")
        return ClientTls.from_files(self.ours.certificate, engine.certificate, engine.key)


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    """See Remote."""
    with short_directory() as directory:
        ours = Authority(directory, "ours")
        server = ours.issue("server")
        port = free_port()
        files = (
            *("--set", f"tls.certificate={server.certificate}", "--set", f"tls.key={server.key}"),
            *("--set", f"tls.client_ca={ours.certificate}"),
        )
        with DaemonProcess(directory / "p.sock", "--listen", f"127.0.0.1:{port}", *files):
            yield Remote(f"localhost:{port}", ours)


def test_a_client_with_a_certificate_puts_and_gets(remote: Remote) -> None:
    hashes = run_of(3)
    options = dataclasses.replace(PATIENT, tls=remote.tls())
    with Client(remote.address, options=options) as client:
        until(lambda: is_ready(client))
        namespace = client.namespace(spec())
        assert namespace.put(zip(hashes, data_of(hashes), strict=True)).stored_count == 3
        assert namespace.get(hashes) == data_of(hashes)


async def test_an_async_client_with_a_certificate_puts_and_gets(remote: Remote) -> None:
    hashes = run_of(3, "async")
    options = dataclasses.replace(PATIENT, tls=remote.tls())
    async with AsyncClient(remote.address, options=options) as client:
        namespace = await client.namespace(spec())
        assert (await namespace.put(zip(hashes, data_of(hashes), strict=True))).stored_count == 3
        assert await namespace.get(hashes) == data_of(hashes)


@pytest.mark.parametrize("shows", [False, True])
def test_a_client_without_our_certificate_misses_and_raises_nothing(
    remote: Remote, shows: bool, tmp_path: Path
) -> None:
    tls = None
    if shows:
        stranger = Authority(tmp_path, "theirs").issue("stranger")
        tls = ClientTls.from_files(remote.ours.certificate, stranger.certificate, stranger.key)
    with Client(remote.address, options=dataclasses.replace(PATIENT, tls=tls, open_wait_s=0.3)) as client:
        assert client.status().state != "ready"
        assert client.namespace(spec()).get(run_of(3)) == []


def test_half_a_pair_and_files_that_are_not_there_are_the_caller_s_mistake() -> None:
    with pytest.raises(InvalidArgument, match="key"):
        ClientTls(b"authorities", certificate=b"certificate")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        ClientTls.from_files("/nonexistent.pem")


def test_a_key_and_a_token_are_not_shown() -> None:
    assert "secret" not in repr(ClientTls(b"a", b"c", b"secret", "secret"))


def test_a_token_that_no_header_can_carry_is_the_caller_s_mistake() -> None:
    for token in ("two words", "line\n", "é"):
        with pytest.raises(InvalidArgument, match="token") as refused:
            ClientTls(b"authorities", token=token)
        assert token not in str(refused.value)


def test_a_client_with_a_token_is_the_token_s_tenant_and_without_it_misses(tmp_path: Path) -> None:
    ours, token = Authority(tmp_path, "ours"), "t" * 40
    server, port, hashes = ours.issue("server"), free_port(), run_of(3, "token")
    (tmp_path / "tokens").write_text(token)
    (tmp_path / "tokens").chmod(0o600)
    with short_directory() as directory:
        files = ("--set", f"tls.certificate={server.certificate}", "--set", f"tls.key={server.key}")
        batch = ("--tenant", f"name=batch,socket={directory}/batch.sock,token_file={tmp_path}/tokens")
        with DaemonProcess(directory / "p.sock", "--listen", f"127.0.0.1:{port}", *files, *batch):
            with Client(f"localhost:{port}", options=with_token(ours, token)) as client:
                until(lambda: is_ready(client))
                stored = client.namespace(spec()).put(zip(hashes, data_of(hashes), strict=True))
                assert stored.stored_count == 3
            with Client(directory / "batch.sock", options=PATIENT) as local:
                until(lambda: is_ready(local))
                assert local.namespace(spec()).get(hashes) == data_of(hashes)
            with Client(f"localhost:{port}", options=with_token(ours, "u" * 40, open_wait_s=0.3)) as stranger:
                assert stranger.status().state != "ready"
                assert stranger.namespace(spec()).get(hashes) == []


def with_token(ours: Authority, token: str, **more: float) -> ClientOptions:
    """Options of a client that trusts our authority and shows a token."""
    tls = ClientTls.from_files(ours.certificate, token=token)
    return dataclasses.replace(PATIENT, tls=tls, **more)
