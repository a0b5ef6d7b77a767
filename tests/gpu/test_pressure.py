"""Every tier under pressure, daemon and engines as processes: what goes down comes back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefixd.v1 import types_pb2

from tests.gpu.device_process import SEGMENT_BYTES, DeviceProcess, device_daemon
from tests.gpu.far_tier import BLOCK, hbm, opened, tier_of, wait_for_all_memory
from tests.support.engine_process import Observer
from tests.support.fake_cuda import FakeCuda

RUN_BLOCKS = 8
SMALL_BYTES = 2 * SEGMENT_BYTES
SMALL_SLOTS = SMALL_BYTES // BLOCK
"""Of HBM, and of DRAM."""


@pytest.fixture
def observer(socket: Path, far_machine: FakeCuda, tmp_path: Path) -> Iterator[Observer]:
    """Of a daemon with little HBM, as little DRAM, and NVMe below, which is to have all that DRAM has."""
    small = device_daemon(
        socket,
        far_machine,
        *("--dram-size", str(SMALL_BYTES), "--data-dir", str(tmp_path / "data")),
        hbm__size=str(SMALL_BYTES),
        nvme__size="64MiB",
        nvme__segment="2MiB",
        migration__high_water="0.05",
        migration__low_water="0",
        policy__name="lru",
    )
    with small, Observer(socket) as watching:
        wait_for_all_memory(watching, SMALL_BYTES)
        watching.wait(
            lambda: tier_of(watching, types_pb2.TIER_NVME),
            lambda tier: tier.state == "ready",
            "NVMe",
        )
        yield watching
        assert watching.problems() == []


def run_of(number: int) -> dict[str, Any]:
    return {"name": "n", "run": f"run {number}", "count": RUN_BLOCKS}


def demoted_from_hbm(observer: Observer) -> int:
    """Blocks that were copied from HBM to DRAM before they had to leave."""
    (link,) = [link for link in observer.stats().traffic.links if link.name == "HBM-DRAM"]
    return link.demotion_bytes // BLOCK


def fill(engine: DeviceProcess, observer: Observer, run_count: int) -> None:
    """Puts runs into HBM, each when what must leave for the next has its copy below."""
    for number in range(run_count):
        assert engine.ask("put_there", **run_of(number)) == RUN_BLOCKS
        due = (number + 2) * RUN_BLOCKS - SMALL_SLOTS
        observer.wait(
            lambda: demoted_from_hbm(observer), lambda count, due=due: count >= due, "HBM is relieved"
        )
        observer.wait(
            lambda: tier_of(observer, types_pb2.TIER_NVME).resident_slot_count,
            lambda count, due=due: count >= due,
            "DRAM is relieved",
        )


def get_all(engine: DeviceProcess, observer: Observer, number: int) -> None:
    """Reads the run as soon as all of it can be read; every byte is as it was put."""
    whole = {"hit": RUN_BLOCKS, "good": RUN_BLOCKS, "true": RUN_BLOCKS}

    def get() -> dict[str, int]:
        seen: dict[str, int] = engine.ask("get", **run_of(number))
        assert seen["hit"] == seen["good"] == seen["true"]
        return seen

    observer.wait(get, lambda seen: seen == whole, f"run {number} is whole")


def test_runs_go_down_from_hbm_to_nvme_under_pressure_and_come_back(
    socket: Path, far_machine: FakeCuda, observer: Observer
) -> None:
    run_count = 3 * SMALL_SLOTS // RUN_BLOCKS
    with DeviceProcess(socket, far_machine) as one, DeviceProcess(socket, far_machine) as two:
        fill(opened(one), observer, run_count)
        kept = run_count * RUN_BLOCKS
        assert observer.stats().block_count == kept, "no block is lost"
        assert hbm(observer).resident_slot_count + observer.slots().resident_slot_count < kept
        opened(two)
        for number in reversed(range(run_count)):
            get_all(two, observer, number)
        assert observer.stats().block_count == kept, "nor is one lost on its way back"
        hits = [engine.ask("acquire", **run_of(0))["hit"] for engine in (one, two)]
        assert hits == [RUN_BLOCKS, RUN_BLOCKS]
        observer.wait(
            lambda: one.ask("tiers", **run_of(0)), lambda tiers: tiers == [["HBM", RUN_BLOCKS]], "promoted"
        )
        assert two.ask("load_to_device", **run_of(0)) == {"good": RUN_BLOCKS, "true": RUN_BLOCKS}


def test_what_is_evicted_from_hbm_is_read_from_dram(
    socket: Path, far_machine: FakeCuda, observer: Observer
) -> None:
    with DeviceProcess(socket, far_machine) as one, DeviceProcess(socket, far_machine) as two:
        opened(one).ask("put", **run_of(0))
        opened(two)
        for engine in (one, two):
            engine.ask("acquire", **run_of(0))
        observer.wait(
            lambda: one.ask("tiers", **run_of(0)), lambda tiers: tiers == [["HBM", RUN_BLOCKS]], "promoted"
        )
        for engine in (one, two):
            engine.ask("release")
        newer = SMALL_SLOTS // RUN_BLOCKS
        for number in range(1, newer + 1):
            assert one.ask("put_there", **run_of(number)) == RUN_BLOCKS
        assert two.ask("tiers", **run_of(0)) == [["DRAM", RUN_BLOCKS]]
        for number in (0, newer):
            get_all(two, observer, number)
