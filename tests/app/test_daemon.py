"""app/daemon.py: the daemon as a process, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.app.exits import Exit
from prefixd_server.rpc.seat import companion_path
from prefixd_server.rpc.server import SERVICE_NAMES

from tests.support.daemon import PREFIXD, DaemonProcess, running_daemon, serving
from tests.support.node import chain
from tests.support.wire import short_directory
from tests.support.wire_engine import WireEngine, put_messages, wire_engine

HASHES = chain("a", "b", "c")
BLOCKS = [bytes([index]) * 4096 for index in range(3)]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short directory."""
    with short_directory() as path:
        yield path


async def holding(engine: WireEngine) -> bytes:
    """Stores a run and leases it: the token."""
    ref = await engine.open_namespace(block_bytes=4096)
    await engine.store(ref, HASHES, BLOCKS)
    token: bytes = (await engine.acquire(ref, HASHES)).lease.token
    return token


def run_prefixd(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run([str(PREFIXD), *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_it_is_ready_for_every_service_and_sigterm_ends_it_without_a_trace(directory: Path) -> None:
    path = directory / "p.sock"
    with DaemonProcess(path) as daemon:
        assert all(serving(path, name) for name in ("", *SERVICE_NAMES))
        assert path.is_socket()
        assert companion_path(path).is_socket()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == Exit.OK
        assert sorted(entry.name for entry in directory.iterdir()) == ["p.log", "p.sock.lock"]
        events = [json.loads(line)["event"] for line in daemon.log.splitlines()]
        assert events[-3:] == ["draining", "drained", "stopped"]


def test_a_second_daemon_on_the_socket_exits_naming_the_first(directory: Path) -> None:
    path = directory / "p.sock"
    with DaemonProcess(path) as first:
        second = run_prefixd("serve", "--socket", str(path), "--dram-size", "2MiB")
        assert second.returncode == Exit.ALREADY_RUNNING
        assert f"pid {first.process.pid}" in second.stderr
        assert serving(path) is True


def test_a_second_daemon_on_the_data_directory_exits_and_leaves_no_socket(directory: Path) -> None:
    data = str(directory / "data")
    with DaemonProcess(directory / "p.sock", "--data-dir", data) as first:
        other = directory / "q.sock"
        second = run_prefixd("serve", "--socket", str(other), "--data-dir", data, "--dram-size", "2MiB")
        assert second.returncode == Exit.ALREADY_RUNNING
        assert f"pid {first.process.pid}" in second.stderr
        assert not other.exists()


def boot_of(path: Path) -> str:
    """The boot id, by the command."""
    stats: dict[str, Any] = json.loads(run_prefixd("stats", "--socket", str(path), "--json").stdout)
    boot_id: str = stats["boot_id"]
    return boot_id


def test_after_sigkill_a_new_daemon_takes_the_sockets_over(directory: Path) -> None:
    path = directory / "p.sock"
    with DaemonProcess(path) as dead:
        boot = boot_of(path)
        dead.kill()
        assert path.is_socket()
    with DaemonProcess(path):
        assert boot_of(path) != boot


def test_something_else_in_the_sockets_place_is_left_alone(directory: Path) -> None:
    path = directory / "p.sock"
    path.write_text("precious")
    refused = run_prefixd("serve", "--socket", str(path), "--dram-size", "2MiB")
    assert refused.returncode == Exit.USAGE
    assert "not a socket" in refused.stderr
    assert path.read_text() == "precious"


async def test_sigterm_drains(directory: Path) -> None:
    path = directory / "p.sock"
    with DaemonProcess(path) as daemon:
        async with wire_engine(path) as engine:
            token = await holding(engine)
            daemon.signal(signal.SIGTERM)
            notice = await engine.stream.read()
            assert 9 < notice.draining.gone_after.seconds + 1 <= 11
            assert await asyncio.to_thread(serving, path) is False
            ref = (await engine.call("ListNamespaces")).namespaces[0].namespace
            refusal = await engine.refused(
                "Acquire", session_id=engine.session_id, namespace=ref, block_hashes=HASHES
            )
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert refusal.retry_after_s is not None
            assert refusal.retry_after_s > 0
            released = await engine.call(
                "Release", session_id=engine.session_id, releases=[wire.LeaseRelease(token=token)]
            )
            assert released.released_count == 1
            assert await asyncio.to_thread(daemon.wait) == Exit.OK


async def test_a_drain_ends_with_its_time_also_when_a_lease_is_held(directory: Path) -> None:
    path = directory / "p.sock"
    with DaemonProcess(path, "--set", "drain.timeout_s=0.2") as daemon:
        async with wire_engine(path) as engine:
            await holding(engine)
            daemon.signal(signal.SIGTERM)
            assert await asyncio.to_thread(daemon.wait) == Exit.OK
        assert '"remaining_leases": 1' in daemon.log


async def test_a_second_signal_ends_it_at_once(directory: Path) -> None:
    path = directory / "p.sock"
    with DaemonProcess(path, "--set", "drain.timeout_s=3600") as daemon:
        async with wire_engine(path) as engine:
            await holding(engine)
            daemon.signal(signal.SIGTERM)
            await engine.stream.read()
            daemon.signal(signal.SIGINT)
            assert await asyncio.to_thread(daemon.wait) == Exit.OK


def test_a_wrong_configuration_ends_it_with_2(directory: Path) -> None:
    refused = run_prefixd("serve", "--socket", str(directory / "p.sock"), "--dram-size", "1GB1")
    assert refused.returncode == Exit.USAGE
    assert "dram.size = 1GB1" in refused.stderr


def test_an_address_in_use_ends_it_with_2_and_leaves_nothing(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        path = directory / "p.sock"
        for flag in ("--listen", "--metrics"):
            refused = run_prefixd("serve", "--socket", str(path), "--dram-size", "2MiB", flag, address)
            assert refused.returncode == Exit.USAGE
            assert "CANNOT_LISTEN" in refused.stderr
            assert not path.exists()


@pytest.fixture
async def on_tcp() -> AsyncIterator[tuple[WireEngine, int]]:
    """An engine on the TCP address, and the metrics' port."""
    async with (
        running_daemon(listen="127.0.0.1:0", metrics="127.0.0.1:0") as daemon,
        wire_engine(f"127.0.0.1:{daemon.ports['listen']}", attach=False) as engine,
    ):
        yield engine, daemon.ports["metrics"]


async def test_over_tcp_there_is_no_companion_and_no_admin_but_put_and_get(
    on_tcp: tuple[WireEngine, int],
) -> None:
    engine, _ = on_tcp
    assert engine.opened.companion_path == ""
    ref = await engine.open_namespace(block_bytes=4096)
    assert (await engine.put(*put_messages(ref, HASHES, BLOCKS))).stored_count == 3
    assert await engine.get(ref, HASHES) == BLOCKS
    refusal = await engine.refused("Check")
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_REQUIRED")


async def test_metrics_count_what_the_wire_did(on_tcp: tuple[WireEngine, int]) -> None:
    engine, port = on_tcp
    ref = await engine.open_namespace(block_bytes=4096)
    await engine.put(*put_messages(ref, HASHES, BLOCKS))
    await engine.get(ref, [*HASHES, b"?" * 32])
    text = await asyncio.to_thread(scrape, port)
    assert 'prefixd_block_hits_total{tenant="default",tier="dram"} 3.0' in text
    assert 'prefixd_blocks_missed_total{tenant="default"} 1.0' in text
    assert 'prefixd_tier_slots{state="resident",tier="dram"} 3.0' in text
    assert 'prefixd_rpc_seconds_count{method="Put",tenant="default"} 1.0' in text
    assert "prefixd_loop_lag_seconds_bucket" in text


def scrape(port: int) -> str:
    """The exposition."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        body: bytes = answer.read()
    return body.decode()


async def test_the_drain_call_stops_admitting_and_goes_on_answering() -> None:
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path) as engine:
        await holding(engine)
        assert (await engine.call("Drain", timeout={"nanos": 10_000_000})).remaining_lease_count == 1
        assert (await engine.call("GetStats")).draining
        assert (await engine.refused("OpenNamespace")).reason == "FIELD_INVALID"
        assert (await engine.stream.read()).WhichOneof("message") == "draining"
        await engine.close()
        assert (await engine.call("Drain")).remaining_lease_count == 0
