"""A full store takes a second block size and a second tenant in, over the wire, within a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.engine_process import EngineProcess, Observer
from tests.support.wire import short_directory

ADMITTED_WITHIN_S = 1.0
PATIENCE_S = 10.0
FIRST_BYTES, SECOND_BYTES = 65_536, 262_144
FULL_RUNS, FULL_COUNT = 18, 16
"""288 blocks of the first size; the store has slots for 256."""
COUNT = 6
"""Blocks of the second size: one segment has slots for 8."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as made:
        yield made


@pytest.fixture
def daemon(directory: Path) -> Iterator[DaemonProcess]:
    """A store with sockets for two tenants."""
    second = f"name=second,socket={second_socket(directory)}"
    with DaemonProcess(directory / "p.sock", "--tenant", second) as daemon:
        yield daemon


@pytest.fixture
def observer(daemon: DaemonProcess) -> Iterator[Observer]:
    """Of the whole daemon; its check must be clean in the end."""
    with Observer(daemon.socket) as observer:
        yield observer
        assert observer.problems() == []


@pytest.fixture
def filler(daemon: DaemonProcess, observer: Observer) -> Iterator[EngineProcess]:
    """An engine of the first tenant that has filled the store, and has all of it mapped."""
    with EngineProcess(daemon.socket) as engine:
        engine.ask("open", name="full", block_bytes=FIRST_BYTES)
        done = engine.ask("turn_over", name="full", prefix="fill", runs=FULL_RUNS, count=FULL_COUNT)
        assert done == dict.fromkeys(("stored", "good", "true"), FULL_RUNS * FULL_COUNT)
        tier = observer.slots()
        assert tier.assigned_bytes == tier.capacity_bytes
        assert tier.free_slot_count < FULL_COUNT
        yield engine


def second_socket(directory: Path) -> Path:
    return directory / "2.sock"


def hits(count: int) -> dict[str, int]:
    return {"hit": count, "good": count, "true": count}


def admit(engine: EngineProcess, name: str, block_bytes: int) -> float:
    """Stores a run as an engine does, trying again when told to; seconds until all of it was stored."""
    engine.ask("open", name=name, block_bytes=block_bytes)
    done = engine.ask("put", name=name, run="newcomer", count=COUNT, patience_s=PATIENCE_S)
    assert (done["declined"], done["dropped"]) == (0, 0)
    assert engine.ask("get", name=name, run="newcomer", count=COUNT) == hits(COUNT)
    return float(done["elapsed_s"])


def last_run_is_whole(filler: EngineProcess) -> None:
    """What the first engine used last was worth keeping."""
    run = f"fill {FULL_RUNS - 1}"
    assert filler.ask("get", name="full", run=run, count=FULL_COUNT) == hits(FULL_COUNT)


def test_a_full_store_admits_a_second_block_size_within_a_second(filler: EngineProcess) -> None:
    assert admit(filler, "second size", SECOND_BYTES) <= ADMITTED_WITHIN_S
    last_run_is_whole(filler)


def test_a_full_store_admits_a_second_tenant_within_a_second(
    filler: EngineProcess, directory: Path, observer: Observer
) -> None:
    before = filler.segment_inodes()
    with EngineProcess(second_socket(directory)) as engine:
        assert admit(engine, "second tenant", FIRST_BYTES) <= ADMITTED_WITHIN_S
        assert not engine.segment_inodes() & before, "tenants never share memory"
        last_run_is_whole(filler)
        # The first tenant is told to unmap what it has lost, and does.
        observer.wait(
            filler.segment_inodes, lambda now: len(now) == len(before) - 1, "the lost segment is unmapped"
        )


def test_both_come_into_a_full_store_while_its_engine_reads_on(
    filler: EngineProcess, daemon: DaemonProcess, directory: Path
) -> None:
    run = f"fill {FULL_RUNS - 2}"
    assert filler.ask("acquire", name="full", run=run, count=FULL_COUNT)["hit"] == FULL_COUNT
    with (
        EngineProcess(daemon.socket) as size,
        EngineProcess(second_socket(directory)) as tenant,
    ):
        for engine in (size, tenant):
            engine.ask("open", name="newcomers", block_bytes=SECOND_BYTES)
            engine.send("put", name="newcomers", run="both", count=COUNT, patience_s=PATIENCE_S)
        for engine in (size, tenant):
            done = engine.receive()
            assert (done["declined"], done["dropped"]) == (0, 0)
            assert done["elapsed_s"] <= ADMITTED_WITHIN_S
            assert engine.ask("get", name="newcomers", run="both", count=COUNT) == hits(COUNT)
    assert filler.ask("load", first=0, count=FULL_COUNT) == {"good": FULL_COUNT, "true": FULL_COUNT}
    filler.ask("release")
