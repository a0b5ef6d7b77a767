"""What operators see and order."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.errors import NotFound, StateConflict
from prefixd_server.base.types import RequestPhase, UsageReport

from tests.cache.conftest import MakeEngine
from tests.support.engine import slot_counts
from tests.support.node import Node, chain, packed


def test_a_dropped_namespace_is_empty_at_once_and_its_slots_come_back(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"abc")
    new_epoch, dropped = node.run(node.cache.drop_namespace("red", one.ref))
    assert (new_epoch > one.ref.epoch, dropped) == (True, 3)
    with pytest.raises(StateConflict):
        one.hits(hashes)
    assert engine().hits(hashes) == 0
    node.settle()
    assert slot_counts(node)[1:] == (0, 0, 0)


def test_a_commit_of_a_dropped_epoch_is_refused(engine: MakeEngine, node: Node) -> None:
    one = engine()
    reserved = one.reserve(chain(*"ab"))
    node.run(node.cache.drop_namespace("red", one.ref))
    with pytest.raises(StateConflict) as refused:
        one.commit(reserved, chain(*"ab"))
    assert refused.value.reason == "NAMESPACE_EPOCH_STALE"
    assert reserved.lease is not None
    node.settle()
    assert node.cache.abort("red", one.session.session_id, reserved.lease.token) == 2
    assert slot_counts(node)[1:] == (0, 0, 0)


def test_another_tenants_namespace_cannot_be_dropped_pinned_or_described(
    engine: MakeEngine, node: Node
) -> None:
    red = engine()
    hashes = red.put(*"ab")
    for order in (
        lambda: node.run(node.cache.drop_namespace("blue", red.ref)),
        lambda: node.cache.pin("blue", red.ref, packed(hashes), True),
        lambda: node.cache.evict("blue", red.ref, None, 0),
        lambda: node.cache.describe("blue", red.ref, 0, 0, packed(hashes[:1])),
    ):
        with pytest.raises(NotFound):
            order()
    assert red.hits(hashes) == 2


def test_a_block_is_described_with_its_place_and_story(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")
    one.acquire(hashes)
    info = node.cache.describe("red", one.ref, 0, 0, packed(hashes[1:]))
    assert info is not None
    assert (info.visible, info.depth, info.child_count, info.parent_hash) == (True, 1, 0, hashes[0])
    (copy,) = info.copies
    assert (copy.state, copy.lease_count) == ("RESIDENT", 1)
    assert [line.split(": ")[1] for line in info.story] == ["reserved", "committed", "visible", "used"]
    assert node.cache.describe("red", one.ref, 0, 0, packed(chain("z"))) is None


def test_evict_takes_what_hangs_below_and_leaves_what_is_held(engine: MakeEngine, node: Node) -> None:
    one = engine()
    long, short = one.put(*"abcd"), one.put(*"abx")
    answer = one.acquire(short)
    assert answer.lease is not None
    assert node.cache.evict("red", one.ref, packed(long), 1) == (2, 2)
    assert (one.hits(long), one.hits(short)) == (2, 3)


def test_evicting_everything_empties_the_namespace(engine: MakeEngine, node: Node) -> None:
    one = engine()
    one.put(*"abcd")
    one.put(*"xy")
    assert node.cache.evict("red", one.ref, None, 0) == (6, 0)
    assert slot_counts(node)[2] == 0


def test_a_pinned_run_outlives_eviction_pressure_until_it_is_unpinned(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")
    assert node.cache.pin("red", one.ref, packed(hashes), True) == 2
    for number in range(300):
        node.clock.advance(0.1)
        one.put("filler", number)
    assert one.hits(hashes) == 2
    assert node.cache.pin("red", one.ref, packed(hashes), False) == 2
    for number in range(300, 600):
        node.clock.advance(0.1)
        one.put("filler", number)
    assert one.hits(hashes) == 0


def test_one_request_is_one_use_however_often_it_is_reported(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")

    def uses() -> int:
        info = node.cache.describe("red", one.ref, 0, 0, packed(hashes[1:]))
        assert info is not None
        return info.use_count

    before = uses()
    ids = ("red", one.session.session_id, one.ref, packed(hashes), 0, (), None)
    node.cache.acquire(*ids, request_id="r1")
    node.cache.acquire(*ids, request_id="r1")
    report = UsageReport(one.ref, "r1", RequestPhase.FINISHED, packed(hashes), output_token_count=3)
    assert node.cache.report_usage("red", one.session.session_id, [report]) == 1
    assert uses() == before + 1
    node.cache.acquire(*ids, request_id="r2")
    assert uses() == before + 2


def test_attention_is_gathered_where_it_fell(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")
    mass = np.array([0.25, 0.5], dtype=np.float32)
    report = UsageReport(one.ref, "r", RequestPhase.FINISHED, packed(hashes), attention_mass=mass)
    node.cache.report_usage("red", one.session.session_id, [report])
    catalog = node.cache.state.catalog
    assert float(catalog.tree.attention[:64].sum()) == pytest.approx(0.75)
