"""A daemon with two devices, and engine processes on either: each on its own, whatever befalls the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prefixd.v1 import admin_service_pb2 as admin
from prefixd_server.app.cli import main

from tests.gpu.device_process import TIER_BYTES, DeviceProcess, device_daemon
from tests.gpu.far_tier import hbm, opened, wait_for_all_memory
from tests.gpu.tier import require_two_devices
from tests.support.daemon import DaemonProcess
from tests.support.engine_process import Observer
from tests.support.fake_cuda import MIB, FakeCuda, uuid_of

BOTH = (0, 1)
RUN: dict[str, Any] = {"name": "n", "run": "shared", "count": 8}
WHOLE = {"hit": 8, "good": 8, "true": 8}


def run_on(device: int) -> dict[str, Any]:
    return RUN | {"run": f"on device {device}"}


def both_devices(socket: Path, machine: FakeCuda) -> DaemonProcess:
    """A daemon with TIER_BYTES on each device."""
    require_two_devices()
    uuids = ",".join(map(uuid_of, BOTH))
    return device_daemon(socket, machine, hbm__device="", hbm__devices=uuids)


@pytest.fixture
def observer(socket: Path, far_machine: FakeCuda) -> Iterator[Observer]:
    with both_devices(socket, far_machine), Observer(socket) as watching:
        wait_for_all_memory(watching, 2 * TIER_BYTES)
        yield watching
        assert watching.problems() == []


@pytest.fixture
def engines(socket: Path, far_machine: FakeCuda, observer: Observer) -> Iterator[list[list[DeviceProcess]]]:
    """Two on each device."""
    made = [[DeviceProcess(socket, far_machine, device) for _ in range(2)] for device in BOTH]
    with made[0][0], made[0][1], made[1][0], made[1][1]:
        for engine in (*made[0], *made[1]):
            opened(engine)
        yield made


def device_stats(observer: Observer, device: int) -> admin.DeviceStats:
    return hbm(observer).devices[device]


def test_two_engines_a_device_share_what_lies_there(
    observer: Observer, engines: list[list[DeviceProcess]]
) -> None:
    for device, (writer, reader) in enumerate(engines):
        run = run_on(device)
        assert writer.ask("put_there", **run) == 8
        assert reader.ask("tiers", **run) == [["HBM", 8]]
        assert reader.ask("get", **run) == WHOLE
        assert reader.ask("load_to_device", **run) == {"good": 8, "true": 8}
    assert [device_stats(observer, device).resident_slot_count for device in BOTH] == [8, 8]
    assert hbm(observer).resident_slot_count == 16


def test_what_lies_on_one_device_is_read_from_dram_on_the_other(
    observer: Observer, engines: list[list[DeviceProcess]]
) -> None:
    (near, _), (far, _) = engines
    assert near.ask("put_there", **RUN) == 8
    assert near.ask("acquire", **RUN)["hit"] == 8, "it stays where it is read"
    observer.wait(lambda: far.ask("get", **RUN), lambda seen: seen == WHOLE, "it is brought down")
    assert far.ask("tiers", **RUN) == [["DRAM", 8]]
    assert near.ask("tiers", **RUN) == [["HBM", 8]]


def test_one_device_is_lost_and_the_engines_of_the_other_go_on(
    socket: Path, far_machine: FakeCuda, observer: Observer, engines: list[list[DeviceProcess]]
) -> None:
    (near, other), (far, reader) = engines
    for engine, run in ((near, run_on(0)), (far, run_on(1))):
        assert engine.ask("put_there", **run) == 8
    near.ask("put", **RUN)
    far_machine.lose(0)
    for engine in (near, other):
        engine.ask("acquire", **RUN)
    observer.wait(lambda: device_stats(observer, 0), lambda seen: seen.state == "off", "the device is off")
    assert "DEVICE_UNAVAILABLE" in device_stats(observer, 0).state_reason
    assert (device_stats(observer, 1).state, hbm(observer).state) == ("ready", "ready")
    assert reader.ask("get", **run_on(1)) == WHOLE
    assert far.ask("tiers", **run_on(1)) == [["HBM", 8]]
    assert far.ask("put_there", **run_on(2)) == 8
    printed = CliRunner().invoke(main, ["stats", "--socket", str(socket)], env={"COLUMNS": "160"}).output
    assert f"{uuid_of(0)} is off" in printed
    rows = {line.split()[0]: line.split()[1] for line in printed.splitlines() if line.startswith("GPU-")}
    assert rows == {uuid_of(0): "off", uuid_of(1): "ready"}


def test_a_restarted_daemon_regains_both_devices(socket: Path, far_machine: FakeCuda) -> None:
    for device in BOTH:
        far_machine.set_capacity(TIER_BYTES + 4 * MIB, device)
    with (
        DeviceProcess(socket, far_machine, 0) as near,
        DeviceProcess(socket, far_machine, 1) as far,
        Observer(socket) as seen,
    ):
        boots = []
        with both_devices(socket, far_machine) as first:
            wait_for_all_memory(seen, 2 * TIER_BYTES)
            for device, engine in enumerate((near, far)):
                assert opened(engine).ask("wait_state", state="ready")["state"] == "ready"
                boots.append(engine.ask("status")["boot"])
                assert engine.ask("put_there", **run_on(device)) == 8
                assert engine.ask("get", **run_on(device)) == WHOLE
                engine.ask("acquire", **run_on(device))
            first.kill()
        with both_devices(socket, far_machine):
            wait_for_all_memory(seen, 2 * TIER_BYTES)
            assert [device_stats(seen, device).allocated_bytes for device in BOTH] == [TIER_BYTES, TIER_BYTES]
            for device, engine in enumerate((near, far)):
                engine.ask("wait_state", state="ready", not_boot=boots[device])
                assert engine.ask("put_there", **run_on(device)) == 8
                assert engine.ask("tiers", **run_on(device)) == [["HBM", 8]]
            assert seen.problems() == []


def test_engines_that_die_on_either_device_leave_nothing_behind(
    far_machine: FakeCuda, observer: Observer, engines: list[list[DeviceProcess]]
) -> None:
    for device, (writer, victim) in enumerate(engines):
        assert writer.ask("put_there", **run_on(device)) == 8
        before = far_machine.in_use_bytes(device)
        victim.ask("get", **run_on(device))
        victim.ask("acquire", **run_on(device))
        victim.ask("reserve", name="n", run="never written", count=4)
        victim.kill()
        observer.wait(observer.leases, lambda leases: leases == [], "no lease is left")
        assert device_stats(observer, device).quarantined_slot_count == 0
        assert far_machine.in_use_bytes(device) <= before
        assert writer.ask("get", **run_on(device)) == WHOLE
