"""Engines that are killed or stopped while they hold slots (DESIGN law 5), beside one that works on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefixd.v1.admin_service_pb2 import LeaseInfo, TierStats

from tests.support.daemon import DaemonProcess
from tests.support.engine_process import EngineProcess, Observer
from tests.support.wire import short_directory

TURNOVER_RUNS, TURNOVER_COUNT = 20, 16
"""320 blocks; the store has slots for 256."""
FREED_WITHIN_S = 1.0
COUNT = 8
SHORT_TTL_S = 1.0
# No heartbeat comes within a test, so that nothing renews a lease behind its back.
# And what comes gets in: importance keeps what is worth more, which depends on how fast the processes are.
SETTINGS = ("--set", "leases.heartbeat_interval_s=60", "--set", "policy.name=lru")


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with short_directory() as directory, DaemonProcess(directory / "p.sock", *SETTINGS) as daemon:
        yield daemon.socket


@pytest.fixture(scope="module")
def observer(socket: Path) -> Iterator[Observer]:
    with Observer(socket) as observer:
        yield observer


@pytest.fixture(scope="module")
def neighbour_process(socket: Path) -> Iterator[EngineProcess]:
    with EngineProcess(socket) as engine:
        engine.ask("open", name="model")
        yield engine


@pytest.fixture
def neighbour(neighbour_process: EngineProcess, observer: Observer) -> Iterator[EngineProcess]:
    """Another engine, always putting and getting; it must see no error and no wrong byte. All ends clean."""
    neighbour_process.ask("churn_start", name="model")
    observer.wait(lambda: rounds(neighbour_process), lambda done: done >= 2, "the neighbour works")
    yield neighbour_process
    before = rounds(neighbour_process)
    observer.wait(lambda: rounds(neighbour_process), lambda done: done >= before + 2, "it still works")
    seen = neighbour_process.ask("churn_stop")
    assert seen | {"rounds": 0} == dict.fromkeys(seen, 0)
    assert observer.problems() == []
    assert held(observer.slots()) == 0


@pytest.fixture
def engine(socket: Path) -> Iterator[EngineProcess]:
    """The engine that things happen to."""
    with EngineProcess(socket) as engine:
        engine.ask("open", name="victim")
        yield engine


@pytest.fixture
def other(socket: Path) -> Iterator[EngineProcess]:
    """A third engine, which works with the victim's runs."""
    with EngineProcess(socket) as engine:
        engine.ask("open", name="victim")
        yield engine


def rounds(engine: EngineProcess) -> int:
    return int(engine.ask("churn_counts")["rounds"])


def held(tier: TierStats) -> int:
    """Slots that are neither free nor resident."""
    return int(tier.reserved_slot_count + tier.quarantined_slot_count)


def leases_of(observer: Observer, engine: EngineProcess) -> list[LeaseInfo]:
    return [lease for lease in observer.leases() if lease.instance_id == engine.instance_id]


def slots_of(observer: Observer, engine: EngineProcess) -> int:
    """Slots that the engine's leases hold, quarantined ones included: the neighbour has leases too."""
    return sum(lease.slot_count for lease in leases_of(observer, engine))


def true(count: int) -> dict[str, int]:
    """What a get of a run says when all of it is there and right."""
    return {"hit": count, "good": count, "true": count}


def turn_over(engine: EngineProcess, prefix: str) -> None:
    """Fills the store with new blocks, so that every slot that can be had is used again."""
    done = engine.ask("turn_over", name="victim", prefix=prefix, runs=TURNOVER_RUNS, count=TURNOVER_COUNT)
    assert done == dict.fromkeys(("stored", "good", "true"), TURNOVER_RUNS * TURNOVER_COUNT)


def begin(engine: EngineProcess, stage: str, run: str) -> int:
    """Brings a put to a stage; how many slots are held then."""
    assert engine.ask("reserve", name="victim", run=run, count=COUNT)["reserved"] == COUNT
    if stage == "half written":
        assert engine.ask("write", count=COUNT // 2) == COUNT // 2
    if stage == "half committed":
        assert engine.ask("store", first=0, count=COUNT // 2)["visible"] == COUNT // 2
        return COUNT // 2
    return COUNT


@pytest.mark.parametrize("stage", ["reserved", "half written", "half committed"])
def test_a_writers_slots_come_back_within_a_second_of_its_death_and_not_before(
    stage: str,
    engine: EngineProcess,
    other: EngineProcess,
    neighbour: EngineProcess,
    observer: Observer,
) -> None:
    run = f"killed while {stage}"
    count = begin(engine, stage, run)
    engine.stop()
    # The store turns over beside it: whatever can be had is had, the stopped writer's slots are not.
    turn_over(other, f"beside {stage}")
    survived = COUNT - count
    assert other.ask("get", name="victim", run=run, count=COUNT) == true(survived)
    assert slots_of(observer, engine) == count
    assert held(observer.slots()) >= count
    dead_at = engine.kill()
    freed_at = observer.wait(lambda: leases_of(observer, engine), lambda left: not left, "slots come back")
    assert freed_at - dead_at <= FREED_WITHIN_S
    assert other.ask("get", name="victim", run=run, count=COUNT) == true(survived)
    assert other.ask("put", name="victim", run=run, count=COUNT)["visible"] == count
    assert other.ask("get", name="victim", run=run, count=COUNT) == true(COUNT)


def test_a_readers_slots_come_back_within_a_second_of_its_death(
    engine: EngineProcess, other: EngineProcess, neighbour: EngineProcess, observer: Observer
) -> None:
    other.ask("put", name="victim", run="read", count=COUNT)
    assert engine.ask("acquire", name="victim", run="read", count=COUNT)["hit"] == COUNT
    assert engine.ask("load", first=0, count=COUNT // 2) == {"good": COUNT // 2, "true": COUNT // 2}
    engine.stop()
    # A leased run outlives a turnover of the whole store.
    turn_over(other, "beside a reader")
    assert slots_of(observer, engine) == COUNT
    assert other.ask("get", name="victim", run="read", count=COUNT) == true(COUNT)
    dead_at = engine.kill()
    freed_at = observer.wait(lambda: leases_of(observer, engine), lambda left: not left, "the lease ends")
    assert freed_at - dead_at <= FREED_WITHIN_S
    assert other.ask("get", name="victim", run="read", count=COUNT) == true(COUNT)


def stopped_past_its_lease(engine: EngineProcess, observer: Observer, run: str) -> None:
    """A writer that stands still in the middle of its put until its slots are quarantined."""
    taken = engine.ask("reserve", name="victim", run=run, count=COUNT, ttl_s=SHORT_TTL_S)
    assert taken["reserved"] == COUNT
    assert engine.ask("write", count=COUNT) == COUNT
    engine.stop()
    observer.wait(lambda: quarantined(observer), lambda count: count == COUNT, "its slots are quarantined")


def quarantined(observer: Observer) -> int:
    return int(observer.slots().quarantined_slot_count)


def test_a_late_writers_bytes_reach_nobody(
    engine: EngineProcess,
    other: EngineProcess,
    neighbour: EngineProcess,
    observer: Observer,
    socket: Path,
) -> None:
    stopped_past_its_lease(engine, observer, "late")
    assert other.ask("put", name="victim", run="late", count=COUNT)["visible"] == COUNT
    engine.resume()
    assert engine.ask("write_late") == COUNT
    assert engine.ask("commit_late") == "LEASE_EXPIRED"
    with EngineProcess(socket) as third:
        third.ask("open", name="victim")
        assert third.ask("get", name="victim", run="late", count=COUNT) == true(COUNT)
        # The whole store is filled once more; not even then is one of the late writer's slots used.
        turn_over(third, "before it writes again")
        assert engine.ask("write_late") == COUNT
        last = f"before it writes again {TURNOVER_RUNS - 1}"
        assert third.ask("get", name="victim", run=last, count=TURNOVER_COUNT) == true(TURNOVER_COUNT)
    assert quarantined(observer) == COUNT
    assert observer.stats().bad_block_count == 0
    # The client library gives the lease up by itself as soon as the engine goes on with its put.
    assert engine.ask("store", first=0, count=COUNT) == {"visible": 0, "waiting": 0, "dropped": COUNT}
    observer.wait(lambda: quarantined(observer), lambda count: count == 0, "an abort ends the quarantine")


def test_a_quarantine_ends_within_a_second_of_the_writers_death(
    engine: EngineProcess, other: EngineProcess, neighbour: EngineProcess, observer: Observer
) -> None:
    stopped_past_its_lease(engine, observer, "never continued")
    dead_at = engine.kill()
    freed_at = observer.wait(
        lambda: quarantined(observer), lambda count: count == 0, "the quarantine ends with the process"
    )
    assert freed_at - dead_at <= FREED_WITHIN_S
    assert other.ask("put", name="victim", run="never continued", count=COUNT)["visible"] == COUNT


def test_a_worker_finishes_its_copy_when_the_scheduler_has_died(
    engine: EngineProcess, other: EngineProcess, neighbour: EngineProcess, observer: Observer, socket: Path
) -> None:
    run: dict[str, Any] = {"name": "sharded", "run": "shared by ranks", "count": COUNT}
    for process in (engine, other):
        process.ask("open", name="sharded", shard_count=2)
    for shard in (0, 1):
        assert other.ask("put", shard=shard, **run)["visible"] == COUNT
    taken = engine.ask("acquire", shards=[], **run)
    assert taken["hit"] == COUNT
    engine.ask("hand_over")
    with EngineProcess(socket, engine.instance_id) as worker:
        worker.ask("open", name="sharded", shard_count=2)
        assert worker.ask("redeem", token=taken["token"], shard=1, **run) == COUNT
        half = COUNT // 2
        assert worker.ask("load", first=0, count=half, shard=1) == {"good": half, "true": half}
        assert slots_of(observer, engine) == 2 * COUNT
        dead_at = engine.kill()
        freed_at = observer.wait(
            lambda: [list(lease.open_shards) for lease in leases_of(observer, engine)],
            lambda shards: shards == [[1]],
            "the shard that nobody redeemed is free",
        )
        assert freed_at - dead_at <= FREED_WITHIN_S
        # A turnover of the store may take everything but the worker's blocks.
        turn_over(other, "beside a worker")
        assert worker.ask("load", first=half, count=half, shard=1) == {"good": half, "true": half}
        assert worker.ask("load", first=0, count=COUNT, shard=1) == {"good": COUNT, "true": COUNT}
        worker.ask("release")
        observer.wait(lambda: leases_of(observer, engine), lambda left: not left, "the lease ends")


def test_an_instance_whose_last_process_dies_leaves_no_lease(
    engine: EngineProcess, other: EngineProcess, neighbour: EngineProcess, observer: Observer, socket: Path
) -> None:
    other.ask("put", name="victim", run="orphan", count=COUNT)
    with EngineProcess(socket, engine.instance_id) as worker:
        worker.ask("open", name="victim")
        token = engine.ask("acquire", name="victim", run="orphan", count=COUNT, shards=[])["token"]
        engine.ask("hand_over")
        assert worker.ask("redeem", name="victim", run="orphan", count=COUNT, token=token, shard=0) == COUNT
        engine.kill()
        worker.kill()
        dead_at = time.monotonic()
        freed_at = observer.wait(lambda: leases_of(observer, engine), lambda left: not left, "it ends")
        assert freed_at - dead_at <= FREED_WITHIN_S
