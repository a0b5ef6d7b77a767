"""The vLLM connector's KV on a GPU: workers, daemon and scheduler's client as processes over the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import IS_REAL
from tests.gpu.device_process import TIER_BYTES, device_daemon
from tests.gpu.far_tier import hbm, wait_for_all_memory
from tests.gpu.vllm_worker import BLOCK_BYTES, STAGING_BYTES, VllmWorker
from tests.support import fake_cuda
from tests.support.daemon import DaemonProcess
from tests.support.engine_process import Observer
from tests.support.fake_cuda import MIB, FakeCuda, uuid_of

RUN = "shared"
COUNT = 8
SAVED_FROM = [3, 1, 2, 9, 8, 7, 20, 30]
LOADED_INTO = [31, 4, 5, 6, 0, 10, 12, 11]
ALL_RIGHT = [True] * COUNT
PART = STAGING_BYTES // BLOCK_BYTES


@pytest.fixture(params=["dram", "hbm"])
def daemon(request: pytest.FixtureRequest, socket: Path, far_machine: FakeCuda) -> Iterator[DaemonProcess]:
    with serving(socket, far_machine, with_hbm=request.param == "hbm") as started:
        yield started


@contextmanager
def serving(socket: Path, machine: FakeCuda, *, with_hbm: bool = False) -> Iterator[DaemonProcess]:
    """A daemon with or without an HBM tier, whose books balance at the end."""
    made = device_daemon(socket, machine) if with_hbm else DaemonProcess(socket)
    with made as started, Observer(socket) as observer:
        if with_hbm:
            wait_for_all_memory(observer)
        yield started
        if started.process.poll() is None:
            assert observer.problems() == []


def saved(worker: VllmWorker, run: str = RUN) -> VllmWorker:
    """The worker, which has computed and saved the run."""
    worker.ask("compute", run=run, first=0, blocks=SAVED_FROM)
    assert worker.ask("save", run=run, blocks=SAVED_FROM) == COUNT
    return worker


def token(worker: VllmWorker, run: str = RUN, count: int = COUNT) -> str:
    """A lease on the run, for the engine's workers to redeem."""
    found = worker.ask("acquire", run=run, count=count)
    assert sum(blocks for _, blocks in found["hits"]) == count
    return str(found["token"])


def right(worker: VllmWorker, blocks: list[int] = LOADED_INTO, run: str = RUN) -> list[bool]:
    answer: list[bool] = worker.ask("right", run=run, first=0, blocks=blocks)
    return answer


def test_what_one_worker_saves_another_loads_bit_by_bit(daemon: DaemonProcess, far_machine: FakeCuda) -> None:
    with (
        VllmWorker(daemon.socket, far_machine, instance="a") as writer,
        VllmWorker(daemon.socket, far_machine, instance="b") as reader,
    ):
        saved(writer)
        assert right(reader) == [False] * COUNT
        found = reader.ask("load", token=token(reader), blocks=LOADED_INTO)
        assert found == {"good": COUNT, "bad": [], "done": ["r"]}
        assert right(reader) == ALL_RIGHT
        assert right(writer, SAVED_FROM) == ALL_RIGHT


def test_a_part_of_a_run_is_loaded_behind_what_the_engine_has(
    daemon: DaemonProcess, far_machine: FakeCuda
) -> None:
    with VllmWorker(daemon.socket, far_machine, instance="a") as worker:
        saved(worker)
        assert worker.ask("load", token=token(worker), blocks=[14, 15], start=3)["good"] == 2
        assert worker.ask("right", run=RUN, first=3, blocks=[14, 15]) == [True, True]


def promoted(worker: VllmWorker, observer: Observer) -> VllmWorker:
    """The worker, whose saved run lies in HBM now, since it was wanted twice."""
    tokens = [token(worker), token(worker)]
    observer.wait(lambda: hbm(observer), lambda tier: tier.resident_slot_count == COUNT, "it is promoted")
    assert [worker.ask("load", token=one, blocks=LOADED_INTO)["good"] for one in tokens] == [COUNT] * 2
    return worker


def test_what_is_shared_is_loaded_from_hbm(socket: Path, far_machine: FakeCuda) -> None:
    with (
        serving(socket, far_machine, with_hbm=True),
        Observer(socket) as observer,
        VllmWorker(socket, far_machine, instance="a") as worker,
    ):
        promoted(saved(worker), observer)
        found = worker.ask("acquire", run=RUN, count=COUNT)
        assert found["hits"] == [["HBM", COUNT]]
        worker.ask("compute", run="other", first=0, blocks=LOADED_INTO)
        assert worker.ask("load", token=found["token"], blocks=LOADED_INTO)["good"] == COUNT
        assert right(worker) == ALL_RIGHT
        observer.wait(observer.leases, lambda leases: leases == [], "nothing is held")


def test_a_load_is_told_when_its_copies_are_done_and_no_sooner(socket: Path, far_machine: FakeCuda) -> None:
    with serving(socket, far_machine), VllmWorker(socket, far_machine, instance="a") as worker:
        saved(worker)
        held = token(worker)
        worker.ask("shut_gate")
        worker.ask("start_load", token=held, blocks=LOADED_INTO)
        worker.ask("wait_at_gate")
        with far_machine.hanging(worker.process.pid):
            worker.ask("open_gate")
            for _ in range(20):
                assert worker.ask("loaded") is None
        assert worker.ask("load_ended")["good"] == COUNT
        assert right(worker) == ALL_RIGHT


def test_a_load_in_the_step_is_over_when_it_returns(socket: Path, far_machine: FakeCuda) -> None:
    with serving(socket, far_machine), VllmWorker(socket, far_machine, instance="a") as worker:
        saved(worker)
        worker.ask("start_load", token=token(worker), blocks=LOADED_INTO, in_step=True)
        assert worker.ask("loaded") == {"good": COUNT, "bad": [], "done": []}
        assert right(worker) == ALL_RIGHT


def test_a_load_comes_behind_what_the_engine_has_begun_to_write(socket: Path, far_machine: FakeCuda) -> None:
    """vLLM zeroes new blocks on its own stream, and a step that has begun may still write to old ones."""
    with serving(socket, far_machine), VllmWorker(socket, far_machine, instance="a") as worker:
        saved(worker)
        worker.ask("compute", run="zeroes", first=0, blocks=LOADED_INTO)
        assert worker.ask("load", token=token(worker), blocks=LOADED_INTO)["good"] == COUNT
        assert right(worker) == ALL_RIGHT


@pytest.mark.parametrize("tier", ["DRAM", "HBM"])
def test_a_damaged_block_never_reaches_the_kv_cache(tier: str, socket: Path, far_machine: FakeCuda) -> None:
    with (
        serving(socket, far_machine, with_hbm=tier == "HBM"),
        VllmWorker(socket, far_machine, instance="a") as worker,
        Observer(socket) as observer,
    ):
        saved(worker)
        if tier == "HBM":
            promoted(worker, observer)
        worker.ask("compute", run="before", first=0, blocks=LOADED_INTO)
        worker.ask("damage", run=RUN, index=5)
        asked = worker.ask("acquire", run=RUN, count=COUNT)
        assert asked["hits"] == [[tier, COUNT]]
        found = worker.ask("load", token=asked["token"], blocks=LOADED_INTO)
        assert found == {"good": 5, "bad": sorted(LOADED_INTO[5:]), "done": ["r"]}
        assert right(worker) == [True] * 5 + [False] * 3
        assert right(worker, run="before") == [False] * 5 + [True] * 3
        observer.wait(observer.leases, lambda leases: leases == [], "the damage is told")
        hits = worker.ask("acquire", run=RUN, count=COUNT)["hits"]
        assert hits == ([["HBM", 5], ["DRAM", 1], ["HBM", 2]] if tier == "HBM" else [["DRAM", 5]])


def test_a_daemon_that_dies_in_the_middle_costs_a_miss(socket: Path, far_machine: FakeCuda) -> None:
    with VllmWorker(socket, far_machine, instance="a") as worker:
        with serving(socket, far_machine) as daemon:
            boot = worker.ask("wait_ready")
            saved(worker)
            held, late = token(worker), token(worker)
            worker.ask("shut_gate")
            worker.ask("start_load", token=held, blocks=LOADED_INTO)
            worker.ask("wait_at_gate")
            daemon.kill()
            worker.ask("open_gate")
            assert worker.ask("load_ended")["good"] == PART, "what was verified already"
            assert right(worker)[:PART] == ALL_RIGHT[:PART]
            assert worker.ask("load", token=late, blocks=SAVED_FROM) == {
                "good": 0,
                "bad": sorted(SAVED_FROM),
                "done": ["r"],
            }
            assert worker.ask("save", run="nowhere to go", blocks=SAVED_FROM) == 0
        with serving(socket, far_machine):
            worker.ask("wait_ready", not_boot=boot)
            saved(worker, "again")
            assert worker.ask("load", token=token(worker, "again"), blocks=LOADED_INTO)["good"] == COUNT
            assert right(worker, run="again") == ALL_RIGHT
        assert worker.ask("lost") == [False, False]


def test_a_daemon_that_dies_under_a_save_leaves_nothing_pending(socket: Path, far_machine: FakeCuda) -> None:
    with serving(socket, far_machine) as daemon, VllmWorker(socket, far_machine, instance="a") as worker:
        worker.ask("wait_ready")
        worker.ask("compute", run=RUN, first=0, blocks=SAVED_FROM)
        worker.ask("shut_gate")
        worker.ask("start_save", run=RUN, blocks=SAVED_FROM)
        worker.ask("wait_at_gate")
        daemon.kill()
        worker.ask("wait_away")
        worker.ask("open_gate")
        assert worker.ask("save_ended") == 0
        worker.ask("close")


def test_a_lost_device_is_a_miss_and_asks_for_nothing_any_more(socket: Path, far_machine: FakeCuda) -> None:
    with serving(socket, far_machine), Observer(socket) as observer:
        with VllmWorker(socket, far_machine, instance="a") as worker:
            saved(worker)
            held = token(worker)
            far_machine.lose(0)
            assert worker.ask("load", token=held, blocks=LOADED_INTO)["bad"] == sorted(LOADED_INTO)
            assert worker.ask("save", run="lost", blocks=SAVED_FROM) == 0
            assert worker.ask("lost") == [True, True]
            for _ in range(3):
                assert worker.ask("save", run="lost", blocks=SAVED_FROM) == 0
            slots = observer.slots()
            assert (slots.reserved_slot_count, slots.quarantined_slot_count) == (0, 0)
            far_machine.heal()
        with VllmWorker(socket, far_machine, instance="b") as other:
            assert other.ask("load", token=token(other), blocks=LOADED_INTO)["good"] == COUNT
            assert right(other) == ALL_RIGHT


@pytest.mark.parametrize("tier_on", [[0], [0, 1]], ids=str)
def test_tensor_ranks_copy_each_on_its_own_device(tmp_path: Path, socket: Path, tier_on: list[int]) -> None:
    if IS_REAL:
        pytest.skip("needs two devices")
    if not fake_cuda.has_compiler():
        pytest.skip("the stand-in driver needs gcc to be built")
    machine = FakeCuda(tmp_path / "cuda", 2, 64 * MIB)
    both = [uuid_of(0), uuid_of(1)]
    more: dict[str, Any] = {"instance": "a", "shard_count": 2, "redeemers": both}
    devices = {"hbm__device": "", "hbm__devices": ",".join(both[device] for device in tier_on)}
    with (
        device_daemon(socket, machine, **devices),
        Observer(socket) as observer,
        VllmWorker(socket, machine, **more) as first,
        VllmWorker(socket, machine, **more, device=1, shard=1) as second,
    ):
        wait_for_all_memory(observer, len(tier_on) * TIER_BYTES)
        for rank in (first, second):
            saved(rank)
        for _ in range(2):
            tokens = [token(first), token(first)]
            for held in tokens:
                for rank in (first, second):
                    assert rank.ask("load", token=held, blocks=LOADED_INTO)["good"] == COUNT
                    assert right(rank) == ALL_RIGHT
            observer.wait(observer.leases, lambda leases: leases == [], "nothing is held")
        observer.wait(
            lambda: hbm(observer),
            lambda tier: tier.resident_slot_count == len(tier_on) * COUNT,
            "what a rank on the tier's device shares is promoted",
        )
        for rank in (first, second):
            assert rank.ask("load", token=token(first), blocks=SAVED_FROM)["good"] == COUNT
            assert right(rank, SAVED_FROM) == ALL_RIGHT
            rank.ask("close")
        assert observer.problems() == []
    assert machine.violations == []


def test_closing_gives_everything_back(socket: Path, far_machine: FakeCuda) -> None:
    with serving(socket, far_machine), VllmWorker(socket, far_machine, instance="a") as worker:
        before = far_machine.in_use_bytes()
        saved(worker)
        worker.ask("load", token=token(worker), blocks=LOADED_INTO)
        worker.ask("close")
        if not IS_REAL:
            assert before - far_machine.in_use_bytes() == 2 * STAGING_BYTES
