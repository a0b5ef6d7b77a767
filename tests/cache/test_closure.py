"""Law 3: a block without its ancestors is useless."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.errors import InvalidRequest, StateConflict
from prefixd_server.base.types import DeclineReason, ReserveOutcome

from tests.cache.conftest import MakeEngine
from tests.support.engine import slot_counts
from tests.support.node import Node, block_data, chain, checksum, packed, write_blocks
from tests.support.specs import spec


def test_a_run_is_hit_as_soon_as_it_is_committed(engine: MakeEngine) -> None:
    writer, reader = engine(), engine(instance="two")
    hashes = chain(*"abc")
    reserved = writer.reserve(hashes)
    assert reader.hits(hashes) == 0
    assert writer.commit(reserved, hashes).visible_count == 3
    assert reader.hits(hashes) == 3


def test_hits_pending_and_misses_add_up_to_what_was_asked(engine: MakeEngine) -> None:
    writer = engine()
    writer.put(*"ab")
    writer.reserve(chain(*"abcd")[2:], parent=chain(*"ab")[-1])
    run = writer.node.cache.lookup("red", writer.ref, packed(chain(*"abcdef")))
    assert (run.hit_count, run.pending_count, run.miss_count) == (2, 2, 2)


def test_a_commit_in_parts_shows_the_run_from_its_start(engine: MakeEngine) -> None:
    writer = engine()
    hashes = chain(*"abcd")
    reserved = writer.reserve(hashes)
    assert reserved.lease is not None
    ids = ("red", writer.session.session_id, reserved.lease.token)
    datas = [block_data(key, 0, writer.block_bytes) for key in hashes]
    write_blocks(writer.node, reserved.extents, datas)
    sums = np.array([checksum(data) for data in datas], dtype=np.uint64)
    writer.node.cache.commit(*ids, 0, sums[:1])
    assert writer.hits(hashes) == 1
    with pytest.raises(StateConflict) as repeated:
        writer.node.cache.commit(*ids, 0, sums[:1])
    assert repeated.value.reason == "COMMIT_OUT_OF_ORDER"
    writer.node.cache.commit(*ids, 1, sums[1:])
    assert writer.hits(hashes) == 4


def test_a_child_committed_before_its_parent_waits_unseen(engine: MakeEngine) -> None:
    first, second = engine(), engine(instance="two")
    hashes = chain(*"abc")
    upper = first.reserve(hashes[:1])
    lower = second.reserve(hashes)
    assert [outcome for outcome, _ in lower.outcomes] == [ReserveOutcome.PENDING, ReserveOutcome.RESERVED]
    done = second.commit(lower, hashes[1:])
    assert (done.visible_count, done.waiting_count) == (0, 2)
    assert first.hits(hashes) == 0
    first.commit(upper, hashes[:1])
    assert first.hits(hashes) == 3


def test_waiting_children_are_dropped_with_their_parents_writer(engine: MakeEngine, node: Node) -> None:
    first, second = engine(), engine(instance="two")
    hashes = chain(*"abc")
    upper = first.reserve(hashes[:1])
    second.commit(second.reserve(hashes), hashes[1:])
    assert upper.lease is not None
    node.cache.abort("red", first.session.session_id, upper.lease.token)
    assert first.hits(hashes) == 0
    free, reserved, resident, quarantined = slot_counts(node)
    assert (reserved, resident, quarantined) == (0, 0, 0)
    assert free > 0


def test_a_writer_below_a_failed_one_is_told_that_its_blocks_were_dropped(
    engine: MakeEngine, node: Node
) -> None:
    first, second = engine(), engine(instance="two")
    hashes = chain(*"abc")
    upper = first.reserve(hashes[:1])
    lower = second.reserve(hashes)
    assert upper.lease is not None
    node.cache.abort("red", first.session.session_id, upper.lease.token)
    done = second.commit(lower, hashes[1:])
    assert (done.visible_count, done.waiting_count, done.dropped_count) == (0, 0, 2)
    assert slot_counts(node)[1:] == (0, 0, 0)


def test_a_run_whose_parent_is_not_kept_is_declined(engine: MakeEngine) -> None:
    hashes = chain(*"abc")
    answer = engine().reserve(hashes[1:], parent=hashes[0])
    assert answer.lease is None
    assert answer.decline_reason is DeclineReason.PARENT_MISSING
    assert answer.outcomes == ((ReserveOutcome.DECLINED, 2),)


def test_a_known_block_cannot_be_hung_below_another_parent(engine: MakeEngine) -> None:
    writer = engine()
    writer.put(*"ab")
    writer.put(*"xy")
    with pytest.raises(InvalidRequest) as refused:
        writer.reserve([chain(*"xy")[1]], parent=chain(*"a")[0])
    assert refused.value.reason == "CHAIN_MISMATCH"
    with pytest.raises(InvalidRequest):
        writer.reserve([b"\x01" * 32, chain(*"xy")[1]])


def test_a_run_with_the_same_hash_twice_is_refused_and_leaks_nothing(engine: MakeEngine, node: Node) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine().reserve([b"\x01" * 32, b"\x02" * 32, b"\x01" * 32])
    assert refused.value.reason == "DUPLICATE_HASH"
    assert slot_counts(node)[1] == 0


def test_a_run_can_be_skipped_into_but_must_be_kept_from_its_root(engine: MakeEngine) -> None:
    writer = engine()
    hashes = writer.put(*"abcd")
    answer = writer.acquire(hashes, skip=3)
    assert answer.run.hit_count == 4
    (part,) = answer.shard_extents
    assert [(extent.first_block, extent.block_count) for extent in part.extents] == [(3, 1)]


def test_the_hit_of_a_sharded_run_is_the_shortest_shards(engine: MakeEngine) -> None:
    what = spec("sharded", shard_count=2)
    left = engine(what=what)
    right = engine(what=what, shard=1)
    left.put(*"abcd")
    right.put(*"ab")
    assert left.hits(chain(*"abcd")) == 2
    right.put(*"xyz")
    left.put(*"x")
    assert left.hits(chain(*"xyz")) == 1
    answer = left.acquire(chain(*"abcd"))
    assert answer.run.hit_count == 2
    assert answer.lease is not None
    redeemed = left.node.cache.redeem("red", right.session.session_id, answer.lease.token, 1)
    assert sum(extent.block_count for extent in redeemed.shard_extents[0].extents) == 2
