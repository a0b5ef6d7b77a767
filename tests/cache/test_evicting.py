"""A large Evict goes in turns; what is held, and what has come or was used meanwhile, stays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest
from prefixd_server.cache.evicting import BATCH_BLOCK_COUNT

from tests.support.churn import engine_of
from tests.support.engine import Engine, slot_counts
from tests.support.node import MIB, Node, chain, packed, start_node

BRANCH_COUNT, BRANCH_LENGTH = 100, 20
BLOCK_COUNT = 1 + BRANCH_COUNT * (BRANCH_LENGTH + 1)


def branch(number: int) -> list[bytes]:
    """One of the runs below the shared block."""
    return chain("shared", number, *range(BRANCH_LENGTH))


@pytest.fixture
def node() -> Iterator[Node]:
    """Room for twice the runs."""
    with closing(start_node(tenants=("red",), dram_bytes=16 * MIB)) as made:
        yield made
        assert made.cache.check() == []


@pytest.fixture
def engine(node: Node) -> Engine:
    """It has stored all branches."""
    made = engine_of(node)
    for number in range(BRANCH_COUNT):
        made.put("shared", number, *range(BRANCH_LENGTH))
        node.clock.advance(1.0)
    assert slot_counts(node)[2] == BLOCK_COUNT
    return made


def turn(node: Node) -> None:
    """One turn of whoever waits for one, after which the books balance."""
    node.loop.call_soon(node.loop.stop)
    node.loop.run_forever()
    assert node.cache.check() == []


def begin(engine: Engine, hashes: list[bytes] | None = None, keep: int = 0) -> asyncio.Task[tuple[int, int]]:
    """An Evict that has let its first batches go."""
    node = engine.node
    run = None if hashes is None else packed(hashes)
    task = node.loop.create_task(node.cache.evict_in_turns("red", engine.ref, run, keep))
    while slot_counts(node)[2] == BLOCK_COUNT:
        turn(node)
    assert slot_counts(node)[2] >= BLOCK_COUNT - BATCH_BLOCK_COUNT - BRANCH_LENGTH
    return task


def end(engine: Engine, task: asyncio.Task[tuple[int, int]]) -> tuple[int, int]:
    """The other turns."""
    while not task.done():
        turn(engine.node)
    return task.result()


def test_everything_goes_in_several_turns(node: Node, engine: Engine) -> None:
    assert end(engine, begin(engine)) == (BLOCK_COUNT, 0)
    assert slot_counts(node)[2] == 0
    assert node.cache.stats("red").counters.evicted == BLOCK_COUNT


def test_a_block_goes_with_all_that_hangs_below_it(node: Node, engine: Engine) -> None:
    assert end(engine, begin(engine, branch(0), 1)) == (BRANCH_LENGTH + 1, 0)
    left = BLOCK_COUNT - BRANCH_LENGTH - 1
    assert node.cache.evict("red", engine.ref, packed(branch(0)), 0) == (left, 0)
    assert slot_counts(node)[2] == 0


def test_what_is_leased_or_pinned_stays_with_what_is_above_it(node: Node, engine: Engine) -> None:
    leased, pinned = branch(3), branch(7)
    engine.acquire(leased[:5])
    node.cache.pin("red", engine.ref, packed(pinned), True)
    held = 5 + len(pinned) - 1
    assert end(engine, begin(engine)) == (BLOCK_COUNT - held, held)
    assert (engine.hits(leased), engine.hits(pinned)) == (5, len(pinned))
    assert slot_counts(node)[2] == held


def test_what_is_leased_between_two_turns_stays(node: Node, engine: Engine) -> None:
    task = begin(engine)
    kept = next(run for run in map(branch, range(BRANCH_COUNT)) if engine.hits(run) == len(run))
    engine.acquire(kept)
    evicted, held = end(engine, task)
    assert engine.hits(kept) == len(kept) == held
    assert evicted == BLOCK_COUNT - held


def test_what_is_stored_between_two_turns_stays(node: Node, engine: Engine) -> None:
    task = begin(engine)
    gone = next(number for number in range(BRANCH_COUNT) if engine.hits(branch(number)) == 1)
    node.clock.advance(1.0)
    engine.put("shared", gone, *range(BRANCH_LENGTH))
    fresh = engine.put("fresh", *range(40))
    end(engine, task)
    assert engine.hits(branch(gone)) == BRANCH_LENGTH + 2
    assert engine.hits(fresh) == len(fresh)


def test_a_namespace_dropped_between_two_turns_is_gone(node: Node, engine: Engine) -> None:
    task = begin(engine)
    node.run(node.cache.drop_namespace("red", engine.ref))
    end(engine, task)
    node.settle()
    assert slot_counts(node)[1:] == (0, 0, 0)
