"""app/notify.py: what a service manager hears, by its own protocol, from a daemon of its own process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd_server.app.exits import Exit
from prefixd_server.app.notify import STOP_MARGIN_S, Notifier, keep_beating

from tests.support.daemon import DaemonProcess
from tests.support.node import chain
from tests.support.notify_listener import NotifyListener
from tests.support.nvme_daemon import Load, NvmeDaemon
from tests.support.wire import short_directory
from tests.support.wire_engine import wire_engine

HASHES = chain("a", "b", "c")
BLOCKS = [bytes([index]) * 4096 for index in range(3)]
NVME = ("--set", "nvme.size=32MiB", "--set", "nvme.segment=2MiB")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short directory."""
    with short_directory() as path:
        yield path


@pytest.fixture
def manager(directory: Path) -> Iterator[NotifyListener]:
    """The manager's end."""
    with NotifyListener(directory / "n") as listener:
        yield listener


def test_ready_is_said_when_dram_serves_and_the_status_names_a_tier_that_still_recovers(
    directory: Path, manager: NotifyListener
) -> None:
    path = directory / "p.sock"
    daemon = DaemonProcess(
        path, "--data-dir", str(directory / "data"), *NVME, environment=manager.environment()
    )
    try:
        ready = manager.next()
        assert ready["READY"] == "1"
        assert path.is_socket()
        daemon.wait_until_serving()
        assert ready["STATUS"].startswith("serving: DRAM ready, NVME recovering (")
        while "NVME ready" not in manager.until("STATUS")["STATUS"]:
            pass
    finally:
        daemon.kill()


def test_nothing_is_said_by_a_daemon_that_cannot_start(directory: Path, manager: NotifyListener) -> None:
    path = directory / "p.sock"
    path.write_text("not a socket")
    daemon = DaemonProcess(path, environment=manager.environment())
    assert daemon.wait() == Exit.USAGE
    assert manager.all_waiting() == []


def test_the_watchdog_is_fed_while_the_loop_turns_and_starves_while_it_does_not(
    directory: Path, manager: NotifyListener
) -> None:
    with DaemonProcess(directory / "p.sock", environment=manager.environment(watchdog_s=0.4)) as daemon:
        for _ in range(5):
            assert manager.until("WATCHDOG")["WATCHDOG"] == "1"
        daemon.signal(signal.SIGSTOP)
        manager.all_waiting()
        with pytest.raises(TimeoutError):
            manager.next(0.8)
        daemon.signal(signal.SIGCONT)
        assert manager.until("WATCHDOG")["WATCHDOG"] == "1"


def test_a_watchdogs_abort_leaves_a_stack_in_the_log(directory: Path) -> None:
    with DaemonProcess(directory / "p.sock") as daemon:
        daemon.signal(signal.SIGABRT)
        assert daemon.wait() == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in daemon.log
        assert "most recent call first" in daemon.log


async def test_stop_says_stopping_asks_for_the_time_of_its_drain_and_drains(
    directory: Path, manager: NotifyListener
) -> None:
    path = directory / "p.sock"
    environment = manager.environment(watchdog_s=2)
    with DaemonProcess(path, "--set", "drain.timeout_s=20", environment=environment) as daemon:
        async with wire_engine(path) as engine:
            ref = await engine.open_namespace(block_bytes=4096)
            await engine.store(ref, HASHES, BLOCKS)
            await engine.acquire(ref, HASHES)
            daemon.signal(signal.SIGTERM)
            stopping = await asyncio.to_thread(manager.until, "STOPPING")
            assert stopping["STATUS"] == "draining"
            assert int(stopping["EXTEND_TIMEOUT_USEC"]) == (20 + STOP_MARGIN_S) * 1e6
            beat = await asyncio.to_thread(manager.until, "WATCHDOG")
            assert beat["STATUS"].startswith("draining: DRAM ready; 1 sessions, 1 leases")
            assert daemon.process.poll() is None
        # The engine is gone, its lease with it.
        assert await asyncio.to_thread(daemon.wait) == Exit.OK
        events = [json.loads(line) for line in daemon.log.splitlines()]
        (drained,) = [event for event in events if event["event"] == "drained"]
        assert drained["remaining_leases"] == 0
        assert events[-1]["event"] == "stopped"


def test_after_sigkill_a_restart_is_ready_again_and_serves_what_nvme_has(
    directory: Path, manager: NotifyListener
) -> None:
    load = Load(random.Random(7), drop_share=0.0)
    with NvmeDaemon(directory, environment=manager.environment()) as daemon:
        load.begin(daemon)
        while daemon.nvme.resident_slot_count < 32:
            load.run(daemon, 4)
        daemon.kill()
    manager.all_waiting()
    with NvmeDaemon(directory, environment=manager.environment(watchdog_s=4)) as daemon:
        assert manager.until("READY")["READY"] == "1"
        while "NVME ready" not in manager.until("STATUS")["STATUS"]:
            pass
        load.begin(daemon)
        assert load.verify(daemon) > 0
        assert daemon.problems() == []


def test_without_a_manager_nothing_is_sent_and_the_beat_goes_on() -> None:
    notifier = Notifier.from_environment({})
    assert notifier.watchdog_s is None
    assert notifier.beat_s == 1.0
    notifier.ready("serving")
    notifier.close()


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_a_watchdog_is_ours_only_when_it_is_meant_for_us(
    variables: dict[str, str], watchdog_s: float | None
) -> None:
    assert Notifier.from_environment(variables).watchdog_s == watchdog_s


def test_what_did_not_get_through_is_said_at_the_next_beat(directory: Path) -> None:
    notifier = Notifier(str(directory / "n"))
    notifier.ready("serving")
    with NotifyListener(directory / "n") as manager:
        notifier.beat("serving: DRAM ready")
        assert manager.next() == {"READY": "1", "STATUS": "serving: DRAM ready"}
        notifier.beat("one line\nonly")
        assert manager.next() == {"STATUS": "one line only"}
    notifier.close()


def test_an_abstract_socket_is_reached(directory: Path) -> None:
    name = f"@prefixd-test-{os.getpid()}"
    notifier = Notifier(name)
    with NotifyListener(Path("\0" + name[1:])) as manager:
        notifier.ready("serving")
        assert manager.next()["READY"] == "1"
    notifier.close()


async def test_what_ends_a_background_task_ends_the_beat() -> None:
    def broken() -> str:
        raise RuntimeError("the sweep has ended")

    with pytest.raises(RuntimeError, match="the sweep has ended"):
        await keep_beating(Notifier(), broken)


def test_a_daemon_whose_sweep_has_ended_says_why_and_ends(directory: Path) -> None:
    program = f"""
from prefixd_server.app import process
from prefixd_server.base.config_sources import load_config
from prefixd_server.base.logs import configure_logging
from prefixd_server.cache.cache import Cache
def broken(self):
    raise RuntimeError("no more sweeping")
Cache.step = broken
config = load_config(flags={{"socket": "{directory}/p.sock", "dram.size": "2MiB"}})
configure_logging(config.log)
raise SystemExit(process.run(config))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == Exit.FAILED
    last_words = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    (told,) = [line for line in last_words if line["event"] == "a background task has ended"]
    assert "no more sweeping" in told["exception"]
