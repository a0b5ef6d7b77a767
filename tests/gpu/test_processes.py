"""Daemon and engines as processes of their own over the driver: what they share, and what a death leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prefixd_server.app.cli import main

from tests.gpu.conftest import IS_REAL
from tests.gpu.device_process import TIER_BYTES, DeviceProcess, device_daemon
from tests.gpu.far_tier import hbm, opened, wait_for_all_memory
from tests.support.daemon import DaemonProcess
from tests.support.engine_process import PATIENT, EngineProcess, Observer
from tests.support.fake_cuda import MIB, FakeCuda

RUN: dict[str, Any] = {"name": "n", "run": "shared", "count": 8}


@pytest.fixture
def daemon(socket: Path, far_machine: FakeCuda) -> Iterator[DaemonProcess]:
    with device_daemon(socket, far_machine) as started:
        yield started


@pytest.fixture
def observer(daemon: DaemonProcess) -> Iterator[Observer]:
    with Observer(daemon.socket) as watching:
        wait_for_all_memory(watching)
        yield watching
        if daemon.process.poll() is None:
            assert watching.problems() == []


def test_engines_share_a_run_in_hbm(socket: Path, far_machine: FakeCuda, observer: Observer) -> None:
    with DeviceProcess(socket, far_machine) as writer, DeviceProcess(socket, far_machine) as reader:
        assert opened(writer).ask("put_there", **RUN) == 8
        assert opened(reader).ask("tiers", **RUN) == [["HBM", 8]]
        for _ in range(3):
            assert reader.ask("get", **RUN) == {"hit": 8, "good": 8, "true": 8}
        assert reader.ask("load_to_device", **RUN) == {"good": 8, "true": 8}
        if not IS_REAL:
            assert far_machine.opened_count == 2, "a process opens a segment once"
    assert hbm(observer).resident_slot_count == 8


def test_what_engines_share_is_promoted_and_loads_by_way_of_hbm(
    socket: Path, far_machine: FakeCuda, observer: Observer
) -> None:
    with DeviceProcess(socket, far_machine) as one, DeviceProcess(socket, far_machine) as two:
        opened(one).ask("put", **RUN)
        opened(two)
        one.ask("acquire", **RUN)
        two.ask("acquire", **RUN)
        observer.wait(
            lambda: hbm(observer), lambda tier: tier.resident_slot_count == 8, "the run is promoted"
        )
        assert one.ask("tiers", **RUN) == [["HBM", 8]]
        assert two.ask("get", **RUN) == {"hit": 8, "good": 8, "true": 8}
        assert two.ask("load", first=0, count=8) == {"good": 8, "true": 8}


def test_an_engine_without_the_device_reads_the_same_run_from_dram(
    socket: Path, far_machine: FakeCuda, observer: Observer
) -> None:
    with DeviceProcess(socket, far_machine) as writer, EngineProcess(socket) as other:
        opened(writer).ask("put_there", **RUN)
        opened(other).ask("get", **RUN)
        observer.wait(observer.slots, lambda tier: tier.resident_slot_count == 8, "the run is brought down")
        assert other.ask("get", **RUN) == {"hit": 8, "good": 8, "true": 8}


def test_a_crashed_engine_leaves_nothing_behind(
    socket: Path, far_machine: FakeCuda, observer: Observer
) -> None:
    with DeviceProcess(socket, far_machine) as writer:
        opened(writer).ask("put_there", **RUN)
        before = far_machine.in_use_bytes()
        with DeviceProcess(socket, far_machine) as victim:
            opened(victim).ask("get", **RUN)
            victim.ask("acquire", **RUN)
            victim.ask("reserve", name="n", run="never written", count=4)
            victim.kill()
        observer.wait(observer.leases, lambda leases: leases == [], "no lease is left")
        assert far_machine.in_use_bytes() == before
        assert hbm(observer).quarantined_slot_count == 0
        assert writer.ask("get", **RUN) == {"hit": 8, "good": 8, "true": 8}


def test_a_stopped_engines_slots_are_listed_and_wait_for_its_death(
    socket: Path, far_machine: FakeCuda
) -> None:
    with (
        device_daemon(socket, far_machine, leases__ttl_max_s="3"),
        Observer(socket) as seen,
        DeviceProcess(socket, far_machine) as victim,
    ):
        wait_for_all_memory(seen)
        opened(victim).ask("put_there", **RUN)
        assert victim.ask("acquire", **RUN)["hit"] == 8
        victim.stop()
        seen.wait(seen.leases, lambda leases: [lease.quarantined for lease in leases] == [True], "it expires")
        (orphan,) = seen.leases()
        assert (orphan.pid, orphan.slot_count) == (victim.process.pid, 8)
        printed = CliRunner().invoke(main, ["leases", "--socket", str(socket)], env={"COLUMNS": "160"}).output
        assert str(victim.process.pid) in printed
        assert "quarantined" in printed
        victim.kill()
        seen.wait(seen.leases, lambda leases: leases == [], "its death ends the wait")
        assert hbm(seen).resident_slot_count == 8
        assert seen.problems() == []


def test_a_restarted_daemon_regains_the_whole_tier(socket: Path, far_machine: FakeCuda) -> None:
    far_machine.set_capacity(TIER_BYTES + 4 * MIB)
    with (
        DeviceProcess(socket, far_machine) as one,
        DeviceProcess(socket, far_machine) as two,
        Observer(socket) as seen,
    ):
        with device_daemon(socket, far_machine) as first:
            wait_for_all_memory(seen)
            for engine in (one, two):
                assert opened(engine).ask("wait_state", state="ready")["state"] == "ready"
            boot = one.ask("status")["boot"]
            assert one.ask("put_there", **RUN) == 8
            assert two.ask("get", **RUN)["true"] == 8
            one.ask("acquire", **RUN)
            first.kill()
        with device_daemon(socket, far_machine):
            wait_for_all_memory(seen)
            assert one.ask("wait_state", state="ready", not_boot=boot)["state"] == "ready"
            assert one.ask("put_there", **RUN) == 8
            assert hbm(seen).state == "ready"
            assert two.ask("wait_state", state="ready", not_boot=boot)["state"] == "ready"
            assert two.ask("get", **RUN) == {"hit": 8, "good": 8, "true": 8}


def test_a_stopped_daemon_gives_its_memory_back(socket: Path, far_machine: FakeCuda) -> None:
    with device_daemon(socket, far_machine) as daemon, Observer(socket) as seen:
        wait_for_all_memory(seen)
        with DeviceProcess(socket, far_machine) as engine:
            opened(engine).ask("put_there", **RUN)
            engine.ask("get", **RUN)
            daemon.process.terminate()
            assert daemon.wait() == 0
            engine.ask("status")


def test_a_lost_device_is_a_miss_and_engines_go_on(
    socket: Path, far_machine: FakeCuda, observer: Observer
) -> None:
    with DeviceProcess(socket, far_machine) as one, DeviceProcess(socket, far_machine) as two:
        opened(one).ask("put", name="n", run="in dram", count=4)
        one.ask("put_there", **RUN)
        opened(two)
        far_machine.lose(0)
        assert two.ask("get", **RUN)["good"] == 0
        for engine in (one, two):
            engine.ask("acquire", name="n", run="in dram", count=4)
        observer.wait(lambda: hbm(observer), lambda tier: tier.state == "off", "the tier is off")
        assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in hbm(observer).state_reason
        for engine in (one, two):
            assert engine.ask("get", name="n", run="in dram", count=4)["true"] == 4
            assert engine.ask("put", name="n", run=f"after {engine.instance_id}", count=4)["visible"] == 4
        far_machine.heal()


def test_a_device_without_room_leaves_dram_to_serve(socket: Path, far_machine: FakeCuda) -> None:
    far_machine.set_capacity(2 * MIB)
    with (
        device_daemon(socket, far_machine),
        Observer(socket) as seen,
        DeviceProcess(socket, far_machine) as engine,
    ):
        seen.wait(lambda: hbm(seen), lambda tier: "OUT_OF_MEMORY" in tier.state_reason, "there is no room")
        assert opened(engine).ask("put_there", **RUN) == 8
        assert engine.ask("tiers", **RUN) == [["DRAM", 8]]
        far_machine.heal()
        wait_for_all_memory(seen)
        assert engine.ask("put_there", name="n", run="now there is", count=8) == 8
        assert engine.ask("tiers", name="n", run="now there is", count=8) == [["HBM", 8]]


def test_an_engine_that_names_a_device_which_it_cannot_find_uses_dram(
    socket: Path, far_machine: FakeCuda, observer: Observer
) -> None:
    options = PATIENT | {"device_uuid": "GPU-of-another-machine"}
    with DeviceProcess(socket, far_machine) as writer, EngineProcess(socket, options=options) as blind:
        opened(writer).ask("put", **RUN)
        assert opened(blind).ask("get", **RUN) == {"hit": 8, "good": 8, "true": 8}
        assert hbm(observer).resident_slot_count == 0
