"""A long run is reserved in turns: as at once where nobody comes between, and not at all where it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from prefixd_server.base.errors import InvalidRequest, NotFound, StateConflict
from prefixd_server.base.types import DeclineReason, Reserved, ReserveOutcome
from prefixd_server.cache.writing import ABORTED_AT_ONCE, BLOCKS_AT_ONCE

from tests.support.churn import engine_of
from tests.support.engine import Engine, slot_counts
from tests.support.node import MIB, Node, chain, packed, start_node

RUN = chain(*range(2 * BLOCKS_AT_ONCE + 100))
ROOM = 16 * MIB // 4096


@pytest.fixture
def node() -> Iterator[Node]:
    """Room for twice the run."""
    with closing(start_node(tenants=("red",), dram_bytes=16 * MIB)) as made:
        yield made
        assert made.cache.check() == []


@pytest.fixture
def engine(node: Node) -> Engine:
    """Of many small blocks."""
    return engine_of(node)


def begin(engine: Engine, hashes: list[bytes] = RUN, parent: bytes | None = None) -> asyncio.Task[Reserved]:
    """A Reserve that has got its first blocks."""
    node = engine.node
    ids = (engine.tenant, engine.session.session_id, engine.ref, 0, 0)
    above = packed([parent]) if parent else None
    task = node.loop.create_task(node.cache.reserve_in_turns(*ids, above, packed(hashes), None))
    turn(node)
    turn(node)
    return task


def turn(node: Node) -> None:
    """One more turn, after which the books balance."""
    node.loop.call_soon(node.loop.stop)
    node.loop.run_forever()
    assert node.cache.check() == []


def end(engine: Engine, task: asyncio.Task[Reserved]) -> Reserved:
    """The other turns."""
    while not task.done():
        turn(engine.node)
    return task.result()


def nothing_is_held(node: Node) -> None:
    """Every slot is free or whole, and no lease is left."""
    assert slot_counts(node)[1::2] == (0, 0)
    assert node.cache.state.leases.live_count() == 0


def test_a_long_run_gets_one_lease_and_contiguous_slots_over_several_turns(engine: Engine) -> None:
    task = begin(engine)
    assert not task.done()
    assert slot_counts(engine.node)[1] == BLOCKS_AT_ONCE
    reserved = end(engine, task)
    assert reserved.outcomes == ((ReserveOutcome.RESERVED, len(RUN)),)
    assert sum(extent.block_count for extent in reserved.extents) == len(RUN)
    assert len(reserved.extents) <= 1 + len(RUN) * 4096 // (2 * MIB)
    assert engine.commit(reserved, RUN).visible_count == len(RUN)
    assert engine.hits(RUN) == len(RUN)


def test_what_is_kept_of_a_long_run_is_told_and_the_rest_reserved(engine: Engine) -> None:
    kept = BLOCKS_AT_ONCE + 50
    engine.put(*range(kept))
    reserved = end(engine, begin(engine))
    assert reserved.outcomes == (
        (ReserveOutcome.PRESENT, kept),
        (ReserveOutcome.RESERVED, len(RUN) - kept),
    )
    assert reserved.extents[0].first_block == kept


def test_of_a_run_beyond_the_room_the_first_blocks_are_stored(node: Node) -> None:
    engine = engine_of(node)
    run = chain("long", *range(ROOM + 100))
    reserved = end(engine, begin(engine, run))
    assert reserved.outcomes == ((ReserveOutcome.RESERVED, ROOM), (ReserveOutcome.DECLINED, len(run) - ROOM))
    assert reserved.decline_reason is DeclineReason.TIER_FULL


def test_what_another_has_begun_to_store_between_two_turns_is_left_to_it(node: Node, engine: Engine) -> None:
    task = begin(engine)
    other = engine_of(node, instance="other")
    theirs = other.reserve(RUN[: BLOCKS_AT_ONCE + 10])
    assert theirs.outcomes == ((ReserveOutcome.PENDING, BLOCKS_AT_ONCE), (ReserveOutcome.RESERVED, 10))
    reserved = end(engine, task)
    assert reserved.outcomes == (
        (ReserveOutcome.RESERVED, BLOCKS_AT_ONCE),
        (ReserveOutcome.DECLINED, len(RUN) - BLOCKS_AT_ONCE),
    )
    assert reserved.retry_after_s is not None
    engine.commit(reserved, RUN[:BLOCKS_AT_ONCE])
    other.commit(theirs, RUN[BLOCKS_AT_ONCE : BLOCKS_AT_ONCE + 10])
    assert engine.hits(RUN) == BLOCKS_AT_ONCE + 10


def test_a_parent_that_is_evicted_between_two_turns_ends_what_was_only_looked_up(
    node: Node, engine: Engine
) -> None:
    engine.put(*range(BLOCKS_AT_ONCE))
    task = begin(engine)
    node.cache.evict("red", engine.ref, packed(RUN), BLOCKS_AT_ONCE // 2)
    reserved = end(engine, task)
    assert reserved.outcomes[-1] == (ReserveOutcome.DECLINED, len(RUN) - BLOCKS_AT_ONCE)
    assert reserved.decline_reason is DeclineReason.PARENT_MISSING


def test_a_caller_that_gives_up_between_two_turns_leaves_nothing(node: Node, engine: Engine) -> None:
    task = begin(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        end(engine, task)
    nothing_is_held(node)


def test_a_session_that_dies_between_two_turns_leaves_nothing(node: Node, engine: Engine) -> None:
    for last_word in (Engine.dies, Engine.loses_its_connection):
        task = begin(engine)
        last_word(engine)
        with pytest.raises(NotFound, match="it has ended or expired"):
            end(engine, task)
        nothing_is_held(node)
        engine = engine_of(node, instance="next")


def test_a_namespace_that_is_dropped_between_two_turns_leaves_nothing(node: Node, engine: Engine) -> None:
    task = begin(engine)
    node.run(node.cache.drop_namespace("red", engine.ref))
    with pytest.raises(StateConflict, match="is over"):
        end(engine, task)
    node.settle()
    nothing_is_held(node)


@pytest.mark.parametrize(("late", "reason"), [(RUN[3], "DUPLICATE_HASH"), (None, "CHAIN_MISMATCH")])
def test_what_is_wrong_late_in_a_run_leaves_nothing_of_its_beginning(
    node: Node, engine: Engine, late: bytes | None, reason: str
) -> None:
    foreign = engine.put("foreign", 1)[1]
    resident = slot_counts(node)[2]
    run = [*RUN[: 2 * BLOCKS_AT_ONCE], late or foreign]
    with pytest.raises(InvalidRequest) as refused:
        end(engine, begin(engine, run))
    assert refused.value.reason == reason
    nothing_is_held(node)
    assert slot_counts(node)[2] == resident


def test_a_long_run_below_a_hidden_parent_counts_whole_against_what_may_wait(
    node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hidden,) = chain("hidden")
    engine.reserve([hidden])
    monkeypatch.setattr(
        node.cache.state, "limits", replace(node.cache.limits, waiting_children_max=len(RUN) - 1)
    )
    task = begin(engine, RUN, hidden)
    reserved = end(engine, task)
    assert reserved.outcomes == ((ReserveOutcome.DECLINED, len(RUN)),)
    assert reserved.decline_reason is DeclineReason.LIMIT_REACHED


def test_a_long_run_is_given_up_from_its_end_in_turns(node: Node, engine: Engine) -> None:
    run = chain(*range(2 * ABORTED_AT_ONCE - 100))
    reserved = end(engine, begin(engine, run))
    assert reserved.lease is not None
    engine.commit(reserved, run[:10], write=False)
    ids = (engine.tenant, engine.session.session_id, reserved.lease.token)
    task = node.loop.create_task(node.cache.abort_in_turns(*ids))
    turn(node)
    assert slot_counts(node)[1:3] == (len(run) - 10 - ABORTED_AT_ONCE, 10)
    while not task.done():
        turn(node)
    assert task.result() == len(run) - 10
    nothing_is_held(node)
    assert engine.hits(run) == 10
