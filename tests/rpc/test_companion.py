"""The companion socket: who gets segments, who is noticed dying, and that garbage harms nobody."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from prefixd_server.base.errors import ConfigError
from prefixd_server.media.dram import DramMedium
from prefixd_server.rpc import deaths
from prefixd_server.rpc.companion import Companion
from prefixd_server.rpc.seat import staging_directory
from prefixd_server.rpc.sockets import bind_unix

from tests.support.companions import FakeCache, RawPeer, until

MIB = 1 << 20
SESSION = bytes(range(16))
OTHER = bytes(16)

CHILD = """
import json, socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect(sys.argv[1])
peer.send(json.dumps({"session": sys.argv[2]}).encode())
print(peer.recv(4096).decode(), flush=True)
if sys.argv[3] == "close":
    peer.close()
    print("closed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache() -> Iterator[FakeCache]:
    dram = DramMedium(2 * MIB, 4)
    assert dram.wait_prefaulted(10)
    yield FakeCache(dram, {SESSION: "a"}, {1: "a", 2: "a", 3: "b"})
    dram.close()


@pytest_asyncio.fixture
async def companion(cache: FakeCache, tmp_path: Path) -> AsyncIterator[Companion]:
    server = Companion(
        tmp_path / "s.fd", "a", cache, 0o660, "", handshake_timeout_s=30, connection_count_max=4
    )
    await server.open()
    yield server
    await server.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.fd"


async def attached(path: Path, session: bytes = SESSION) -> RawPeer:
    peer = RawPeer(path)
    peer.ask(session=session.hex())
    assert await peer.receive() == ({"ok": True}, [])
    return peer


async def refused(peer: RawPeer) -> object:
    """The reason of the last packet before the daemon closes."""
    answer, _ = await peer.receive()
    assert answer is not None
    assert await peer.receive() == (None, [])
    peer.close()
    return answer["error"]


async def start_child(path: Path, then: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), SESSION.hex(), then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert json.loads(await asyncio.to_thread(child.stdout.readline)) == {"ok": True}
    return child


def end_child(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


async def test_segments_come_with_their_descriptors_in_the_order_asked(
    companion: Companion, cache: FakeCache, path: Path
) -> None:
    peer = await attached(path)
    assert cache.peers[SESSION] == (os.getpid(), os.getuid())
    peer.ask(segments=[2, 1])
    for segment_id in (2, 1):
        cache.dram.view(segment_id - 1, 0, 1)[0] = segment_id
        answer, (fd,) = await peer.receive()
        assert answer == {"segment": segment_id, "length_bytes": 2 * MIB}
        assert os.pread(fd, 1, 0) == bytes([segment_id])
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4 * MIB)
        os.close(fd)
    peer.close()


async def test_anothers_segment_and_one_that_never_was_look_the_same(
    companion: Companion, path: Path
) -> None:
    peer = await attached(path)
    peer.ask(segments=[3, 99, 1])
    assert await peer.receive() == ({"segment": 3, "error": "SEGMENT_UNKNOWN"}, [])
    assert await peer.receive() == ({"segment": 99, "error": "SEGMENT_UNKNOWN"}, [])
    answer, fds = await peer.receive()
    assert answer == {"segment": 1, "length_bytes": 2 * MIB}
    os.close(fds[0])
    peer.close()


async def test_more_answers_than_the_sockets_buffer_holds_all_arrive(
    companion: Companion, path: Path
) -> None:
    peer = await attached(path)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    wanted = [1 + number % 2 for number in range(256)]
    peer.ask(segments=wanted)
    peer.ask(segments=[1])
    await asyncio.sleep(0)
    for segment_id in [*wanted, 1]:
        answer, fds = await peer.receive()
        assert answer is not None
        assert answer["segment"] == segment_id
        os.close(fds[0])
    peer.close()


async def test_a_session_that_is_not_known_is_refused(companion: Companion, path: Path) -> None:
    peer = RawPeer(path)
    peer.ask(session=OTHER.hex())
    assert await refused(peer) == "SESSION_UNKNOWN"


async def test_a_session_has_one_connection(companion: Companion, path: Path) -> None:
    first = await attached(path)
    second = RawPeer(path)
    second.ask(session=SESSION.hex())
    assert await refused(second) == "SESSION_ATTACHED"
    first.close()


async def test_a_session_that_has_ended_gets_no_more_segments(
    companion: Companion, cache: FakeCache, path: Path
) -> None:
    peer = await attached(path)
    del cache.sessions[SESSION]
    peer.ask(segments=[1])
    assert await refused(peer) == "SESSION_UNKNOWN"


@pytest.mark.parametrize(
    "packet",
    [
        b"\x00\xff\xfe",
        b"[]",
        b"{}",
        b'{"session": 5}',
        b'{"session": "zz0102030405060708090a0b0c0d0e0f"}',
        b'{"session": "00"}',
        b"[" * 3000,
        b'{"session": "' + b"0" * 5000 + b'"}',
    ],
)
async def test_garbage_instead_of_a_hello_gets_an_error_and_the_end(
    companion: Companion, path: Path, packet: bytes
) -> None:
    peer = RawPeer(path)
    peer.send(packet)
    assert await refused(peer) == "PACKET_INVALID"
    (await attached(path)).close()


@pytest.mark.parametrize(
    "packet",
    [
        b"null",
        b'{"segments": []}',
        b'{"segments": [true]}',
        b'{"segments": [-1]}',
        b'{"segments": [1.5]}',
        b'{"segments": [18446744073709551616]}',
        b'{"segments": "1"}',
        b'{"segments": [' + b"1," * 256 + b"1]}",
    ],
)
async def test_garbage_instead_of_a_request_ends_the_session_only(
    companion: Companion, cache: FakeCache, path: Path, packet: bytes
) -> None:
    peer = await attached(path)
    peer.send(packet)
    assert await refused(peer) == "PACKET_INVALID"
    assert cache.names(SESSION) == ["attach", "lost"]
    assert companion.connection_count == 0


async def test_descriptors_that_a_client_sends_are_dropped(companion: Companion, path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Path("/dev/null").open() as sent:
        peer = RawPeer(path)
        socket.send_fds(peer.socket, [b"garbage"], [sent.fileno()])
        assert await refused(peer) == "PACKET_INVALID"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_silent_client_is_sent_away(cache: FakeCache, path: Path) -> None:
    companion = Companion(path, "a", cache, 0o660, "", handshake_timeout_s=0.01)
    await companion.open()
    assert await refused(RawPeer(path)) == "HANDSHAKE_TIMEOUT"
    await companion.close()


async def test_connections_of_a_tenant_are_bounded(companion: Companion, path: Path) -> None:
    peers = [RawPeer(path) for _ in range(4)]
    await until(lambda: companion.connection_count == 4)
    assert await refused(RawPeer(path)) == "CONNECTION_LIMIT"
    peers[0].close()
    await until(lambda: companion.connection_count == 3)
    for peer in [*peers[1:], await attached(path)]:
        peer.close()


async def test_a_failure_of_the_cache_ends_one_connection_and_no_other(
    companion: Companion, cache: FakeCache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.sessions[OTHER] = "a"
    first, second = await attached(path), await attached(path, OTHER)

    def fail(tenant: str, segment_id: int) -> tuple[int, int]:
        raise RuntimeError("boom")

    with monkeypatch.context() as patched:
        patched.setattr(cache, "segment_fd", fail)
        first.ask(segments=[1])
        assert await refused(first) == "INTERNAL"
    second.ask(segments=[1])
    answer, fds = await second.receive()
    assert answer is not None
    os.close(fds[0])
    second.close()


async def test_a_killed_process_is_noticed(companion: Companion, cache: FakeCache, path: Path) -> None:
    cache.quarantined.add(SESSION)
    child = await start_child(path, "stay")
    end_child(child)
    await until(lambda: "dead" in cache.names(SESSION))
    await until(lambda: companion.connection_count == 0)
    assert companion.watched_count == 0


async def test_a_death_is_noticed_after_the_connection_is_gone_while_it_matters(
    companion: Companion, cache: FakeCache, path: Path
) -> None:
    cache.quarantined.add(SESSION)
    child = await start_child(path, "close")
    await until(lambda: "lost" in cache.names(SESSION))
    assert companion.watched_count == 1
    assert "dead" not in cache.names(SESSION)
    end_child(child)
    await until(lambda: "dead" in cache.names(SESSION))
    assert companion.watched_count == 0


async def test_a_death_that_does_not_matter_is_not_watched_for(
    companion: Companion, cache: FakeCache, path: Path
) -> None:
    child = await start_child(path, "close")
    await until(lambda: "lost" in cache.names(SESSION))
    assert companion.watched_count == 0
    end_child(child)


async def test_a_process_that_comes_again_is_watched_once(
    companion: Companion, cache: FakeCache, path: Path
) -> None:
    cache.sessions[OTHER] = "a"
    cache.quarantined.add(SESSION)
    first = await attached(path)
    first.close()
    await until(lambda: "lost" in cache.names(SESSION))
    assert companion.watched_count == 1
    del cache.sessions[SESSION]  # as the sessions do when the process attaches anew and nothing is in doubt
    second = await attached(path, OTHER)
    assert companion.watched_count == 1
    second.close()
    await until(lambda: "lost" in cache.names(OTHER))
    assert companion.watched_count == 0


async def test_a_stopped_process_is_not_dead(companion: Companion, cache: FakeCache, path: Path) -> None:
    cache.quarantined.add(SESSION)
    child = await start_child(path, "stay")
    child.send_signal(19)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    probe = RawPeer(path)
    probe.send(b"{}")
    assert await refused(probe) == "PACKET_INVALID"
    assert cache.names(SESSION) == ["attach"]
    end_child(child)
    await until(lambda: "dead" in cache.names(SESSION))


async def test_the_end_of_file_is_the_proof_where_the_pid_is_not_visible(
    companion: Companion, cache: FakeCache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd_server.rpc.companion.peer_of", lambda _: deaths.Peer(0, 65534))
    peer = await attached(path)
    assert companion.watched_count == 0
    peer.close()
    await until(lambda: cache.names(SESSION) == ["attach", "lost", "dead"])


async def test_without_peer_pidfds_the_pid_is_opened(
    companion: Companion, cache: FakeCache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "SO_PEERPIDFD", 9999)
    cache.quarantined.add(SESSION)
    child = await start_child(path, "stay")
    assert companion.watched_count == 1
    end_child(child)
    await until(lambda: "dead" in cache.names(SESSION))


async def test_closing_closes_everything(cache: FakeCache, path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    companion = Companion(path, "a", cache, 0o660, "")
    await companion.open()
    peer = await attached(path)
    await companion.close()
    await companion.close()
    assert await peer.receive() == (None, [])
    peer.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert cache.names(SESSION) == ["attach"]


def test_a_socket_appears_with_its_mode_and_group(path: Path) -> None:
    made = bind_unix(path, socket.SOCK_STREAM, 0o604, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert not staging_directory(path).exists()
    made.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give any group away")
def test_a_socket_is_given_to_the_group(path: Path) -> None:
    made = bind_unix(path, socket.SOCK_STREAM, 0o660, "daemon")
    assert path.group() == "daemon"
    made.close()


def test_a_group_may_be_a_number_where_names_are_not_known(path: Path) -> None:
    bind_unix(path, socket.SOCK_STREAM, 0o660, str(os.getgid())).close()
    assert path.stat().st_gid == os.getgid()
    with pytest.raises(ConfigError, match="not a member"):
        bind_unix(path.with_name("q"), socket.SOCK_STREAM, 0o660, str(1 << 40))


def test_an_unknown_group_is_refused_with_the_remedy(path: Path) -> None:
    with pytest.raises(ConfigError, match="no such group"):
        bind_unix(path, socket.SOCK_STREAM, 0o660, "no-such-group-here")
    assert not path.exists()


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        bind_unix(tmp_path / "nowhere" / "s", socket.SOCK_STREAM, 0o660, "")


def test_a_socket_in_a_deep_directory_can_be_made(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    made = bind_unix(deep / "s", socket.SOCK_STREAM, 0o660, "")
    assert (deep / "s").is_socket()
    made.close()
