"""`prefixd serve --takeover` between real processes: what engines notice, and who has the node at the end."""

from __future__ import annotations

import random
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd.v1 import types_pb2
from prefixd_server.app.exits import Exit

from tests.support.daemon import PREFIXD, DaemonProcess, serving
from tests.support.engine_process import EngineProcess
from tests.support.nvme_daemon import (
    NvmeCalls,
    NvmeDaemon,
    assert_balanced,
    block_bytes_of,
    wait_for,
)
from tests.support.ports import free_port
from tests.support.takeover import begun_count, events, lock_holder, successor, wait_until_it_serves
from tests.support.wire import short_directory

RUN_BLOCKS, STORED_COUNT, RUN_COUNT_MAX = 8, 40, 2_000
"""Blocks of a run; blocks that NVMe has when a test goes on; runs to try: memory is full after eight."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """For the socket, the log and the data."""
    with short_directory() as path:
        yield path


class Stored:
    """Runs of one namespace that were put before a takeover."""

    def __init__(self, daemon: NvmeCalls) -> None:
        rng = random.Random(7)
        self.runs: list[list[bytes]] = []
        ref = daemon.open_namespace("one")
        while daemon.nvme.resident_slot_count < STORED_COUNT:
            assert len(self.runs) < RUN_COUNT_MAX, daemon.nvme
            self.runs.append([rng.randbytes(32) for _ in range(RUN_BLOCKS)])
            daemon.put(ref, self.runs[-1])

    def read(self, daemon: NvmeCalls) -> int:
        """Blocks served, every one right."""
        ref = daemon.open_namespace("one")
        served = 0
        for run in self.runs:
            blocks = daemon.get(ref, run)
            assert blocks == [block_bytes_of(key, ref.epoch) for key in run[: len(blocks)]]
            served += len(blocks)
        return served


def rounds(engine: EngineProcess) -> int:
    """Puts and gets that an engine has done beside the test."""
    return int(engine.ask("churn_counts")["rounds"])


def begin(directory: Path, failpoints: str = "") -> NvmeDaemon:
    """The old daemon, at work."""
    daemon = NvmeDaemon(directory, failpoints)
    daemon.wait_until_serving()
    daemon.wait_until_recovered()
    return daemon


def test_nvme_goes_to_the_new_daemon_and_the_old_one_ends(directory: Path) -> None:
    with begin(directory) as old:
        stored = Stored(old)
        kept = old.nvme.resident_slot_count
        with successor(directory) as new:
            wait_until_it_serves(new)
            assert old.wait() == Exit.OK
            new.wait_until_recovered()
            assert new.nvme.resident_slot_count >= kept
            assert stored.read(new) >= kept
            assert lock_holder(directory) == new.process.pid
            third = subprocess.run(
                [PREFIXD, "serve", "--socket", old.socket, "--dram-size", "2MiB"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert third.returncode == Exit.ALREADY_RUNNING
            assert f"pid {new.process.pid}" in third.stderr
            assert_balanced(new)


def test_engines_at_work_see_no_error_and_go_on_with_the_new_daemon(directory: Path) -> None:
    with begin(directory) as old, EngineProcess(old.socket) as first, EngineProcess(old.socket) as second:
        for engine in (first, second):
            engine.ask("open", name="model")
            engine.ask("churn_start", name="model")
            wait_for(lambda engine=engine: rounds(engine) > 0, "an engine at work")
        boot = first.ask("status")["boot"]
        with successor(directory) as new:
            wait_until_it_serves(new)
            assert old.wait() == Exit.OK
            for engine in (first, second):
                assert engine.ask("wait_state", state="ready", not_boot=boot)["state"] == "ready"
                done = rounds(engine)
                wait_for(lambda engine=engine, done=done: rounds(engine) > done, "an engine that goes on")
                counts = engine.ask("churn_stop")
                assert (counts["wrong"], counts["raised"]) == (0, 0), counts
                assert engine.ask("put", name="model", run="later", count=4, patience_s=5.0)["declined"] == 0
                assert engine.ask("get", name="model", run="later", count=4)["true"] == 4
            assert_balanced(new)


def test_a_lease_of_the_old_daemon_is_good_until_it_is_released(directory: Path) -> None:
    with begin(directory) as old, EngineProcess(old.socket) as holder, EngineProcess(old.socket) as other:
        for engine in (holder, other):
            engine.ask("open", name="model")
        assert holder.ask("put", name="model", run="kept", count=4)["visible"] == 4
        assert holder.ask("acquire", name="model", run="kept", count=4)["hit"] == 4
        boot = holder.ask("status")["boot"]
        with successor(directory) as new:
            wait_until_it_serves(new)
            assert other.ask("wait_state", state="ready", not_boot=boot)["boot"] != boot
            assert old.process.poll() is None
            assert holder.ask("load", first=0, count=4) == {"good": 4, "true": 4}
            holder.ask("release")
            assert old.wait() == Exit.OK
            assert holder.ask("wait_state", state="ready", not_boot=boot)["boot"] != boot


OLD_DIES_AT = (
    "takeover.asked",
    "takeover.nvme-closed",
    "takeover.released",
    "takeover.yielded",
    "takeover.served",
)


@pytest.mark.parametrize("step", OLD_DIES_AT)
def test_an_old_daemon_that_dies_on_the_way_leaves_the_node_to_the_new_one(
    directory: Path, step: str
) -> None:
    with begin(directory, step) as old:
        stored = Stored(old)
        with successor(directory) as new:
            wait_until_it_serves(new)
            assert old.wait() == -9
            wait_for(new.is_serving, "an answer, once the channel has noticed the death")
            new.wait_until_recovered()
            assert stored.read(new) > 0
            assert lock_holder(directory) == new.process.pid
            assert_balanced(new)


NEW_DIES_AT = ("takeover.given", "takeover.opened", "takeover.ready", "takeover.published")


@pytest.mark.parametrize("step", NEW_DIES_AT)
def test_a_new_daemon_that_dies_on_the_way_leaves_the_node_to_the_old_one(directory: Path, step: str) -> None:
    with begin(directory) as old:
        stored = Stored(old)
        assert successor(directory, step).wait() == -9
        wait_until_it_serves(old, 2)
        old.wait_until_serving()
        old.wait_until_recovered()
        assert stored.read(old) > 0
        assert lock_holder(directory) == old.process.pid
        assert_balanced(old)


def test_a_new_daemon_that_dies_before_it_asks_has_changed_nothing(directory: Path) -> None:
    with begin(directory) as old:
        boot = old.tier(types_pb2.TIER_DRAM)
        assert successor(directory, "takeover.memory").wait() == -9
        assert old.nvme.state == "ready"
        assert begun_count(old) == 1
        assert old.tier(types_pb2.TIER_DRAM) == boot


def test_a_new_daemon_without_memory_ends_and_the_old_one_serves_on(directory: Path) -> None:
    with begin(directory) as old:
        refused = subprocess.run(
            [PREFIXD, "serve", "--takeover", "--socket", old.socket, "--dram-size", "64TiB"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert refused.returncode == Exit.USAGE
        assert "DRAM_" in refused.stderr
        assert serving(old.socket) is True
        assert [event["event"] for event in events(old)].count("handing over") == 0


def test_a_new_daemon_that_cannot_serve_leaves_the_node_to_the_old_one(directory: Path) -> None:
    with socket.socket() as taken, begin(directory) as old:
        stored = Stored(old)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        metrics = f"127.0.0.1:{taken.getsockname()[1]}"
        new = NvmeDaemon(directory, "", None, "--takeover", "--metrics", metrics)
        assert new.wait() == Exit.USAGE
        wait_until_it_serves(old, 2)
        wait_for(old.is_serving, "an answer")
        old.wait_until_recovered()
        assert stored.read(old) > 0
        assert lock_holder(directory) == old.process.pid


def test_where_nobody_runs_it_starts_as_always(directory: Path) -> None:
    with successor(directory) as only:
        wait_until_it_serves(only)
        assert_balanced(only)
        only.kill()
    with successor(directory) as again:
        wait_until_it_serves(again)
        assert lock_holder(directory) == again.process.pid


def test_takeovers_follow_one_another(directory: Path) -> None:
    with begin(directory) as first:
        stored = Stored(first)
        daemons: list[DaemonProcess] = [first]
        try:
            for _ in range(2):
                daemons.append(successor(directory))
                wait_until_it_serves(daemons[-1])
                assert daemons[-2].wait() == Exit.OK
            calls = NvmeCalls(first.socket)
            calls.wait_until_recovered()
            assert stored.read(calls) >= STORED_COUNT
            assert_balanced(calls)
        finally:
            for daemon in daemons:
                daemon.kill()


def test_addresses_on_tcp_go_over_too(directory: Path) -> None:
    port = free_port()
    flags = ("--metrics", f"127.0.0.1:{port}")
    with DaemonProcess(directory / "p.sock", *flags) as old:
        assert scrape(port)
        with DaemonProcess(directory / "p.sock", *flags, "--takeover") as new:
            wait_until_it_serves(new)
            assert old.wait() == Exit.OK
            assert "prefixd_draining 0.0" in scrape(port)


def scrape(port: int) -> str:
    """The exposition."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        body: bytes = answer.read()
    return body.decode()
