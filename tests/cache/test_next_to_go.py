"""The line of what DRAM drops next: chosen once, copied first, in order of worth."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.types import NO_SLOT, Rows, Tier
from prefixd_server.cache.next_to_go import NextToGo
from prefixd_server.cache.worth import AT_ANY_PRICE, by_worth
from prefixd_server.catalog.catalog import Catalog
from prefixd_server.catalog.events import BlocksRemoved, CopiesEvicted
from prefixd_server.policy.signals import gap_code, history_byte

from tests.cache.conftest import MakeEngine
from tests.support.engine import Engine
from tests.support.node import Node, chain, packed

POOL = 0


@pytest.fixture
def one(node: Node, engine: MakeEngine) -> Engine:
    made = engine()
    for number in range(20):
        made.put("run", number, *range(3))
        node.clock.advance(1.0)
    return made


def rows_of(node: Node, engine: Engine, hashes: list[bytes]) -> Rows:
    catalog = node.cache.state.catalog
    namespace = catalog.namespaces.get("red", engine.ref)
    return catalog.find(catalog.namespaces.space(namespace, 0, 0), packed(hashes))


def store(catalog: Catalog, rows: Rows) -> None:
    """As if NVMe had them."""
    catalog.columns.slot[Tier.NVME][rows] = 7
    catalog.tree.copies_added(Tier.NVME, rows)


def forget(catalog: Catalog, rows: Rows) -> None:
    """As if NVMe had them no more."""
    catalog.tree.copies_dropped(Tier.NVME, rows)
    catalog.columns.slot[Tier.NVME][rows] = NO_SLOT


def test_a_node_is_chosen_once_and_the_line_is_as_long_as_asked(node: Node, one: Engine) -> None:
    line = NextToGo(node.cache.state)
    line.choose(POOL, 20)
    assert line.block_count(POOL) == 20
    first = [rows.tolist() for rows in line.unstored(POOL, ())]
    line.choose(POOL, 20)
    assert [rows.tolist() for rows in line.unstored(POOL, ())] == first
    line.choose(POOL, 40)
    later = [rows.tolist() for rows in line.unstored(POOL, ())]
    assert later[: len(first)] == first
    rows = [row for part in later for row in part]
    assert len(rows) == len(set(rows)) == 40


def test_what_is_used_again_leaves_the_line(node: Node, one: Engine) -> None:
    line = NextToGo(node.cache.state)
    line.choose(POOL, 8)
    oldest = one.put("run", 0, *range(3))
    one.acquire(oldest)
    chosen = [row for part in line.unstored(POOL, ()) for row in part.tolist()]
    assert not set(chosen) & set(rows_of(node, one, oldest).tolist())
    line.choose(POOL, 8)
    assert line.block_count(POOL) == 8


def test_only_what_nvme_has_is_taken_and_deepest_first(node: Node, one: Engine) -> None:
    catalog = node.cache.state.catalog
    line = NextToGo(node.cache.state)
    line.choose(POOL, 12)
    assert list(line.take(POOL, 12)) == []
    parts = list(line.unstored(POOL, ()))
    store(catalog, parts[1])
    (taken,) = line.take(POOL, 12)
    assert taken.tolist() == parts[1].tolist()
    assert catalog.columns.depth[taken].tolist() == sorted(
        catalog.columns.depth[taken].tolist(), reverse=True
    )
    forget(catalog, taken)


def test_room_beyond_what_is_needed_costs_no_block(node: Node, one: Engine) -> None:
    catalog, room = node.cache.state.catalog, node.cache.room
    room.next_to_go = line = NextToGo(node.cache.state)
    line.choose(POOL, 12)
    stored = next(iter(line.unstored(POOL, ())))
    store(catalog, stored)
    known = catalog.columns.count
    assert room.evict(Tier.DRAM, POOL, len(stored), slack=5) == len(stored)
    assert catalog.columns.count == known
    assert room.evict(Tier.DRAM, POOL, 4, slack=5) == 4
    assert catalog.columns.count == known - 4
    forget(catalog, stored)
    node.cache.state.apply(BlocksRemoved(stored))


def test_what_was_tried_and_refused_may_go_without_a_copy(node: Node, one: Engine) -> None:
    line = NextToGo(node.cache.state)
    line.choose(POOL, 4)
    (rows,) = line.unstored(POOL, ())
    assert list(line.unstored(POOL, set(rows.tolist()))) == []
    assert list(line.unstored(POOL, ())) == []
    assert [taken.tolist() for taken in line.take(POOL, 4)] == [rows.tolist()]


def test_what_was_refused_before_anybody_could_look_is_not_tried_for_ever(node: Node, one: Engine) -> None:
    line = NextToGo(node.cache.state)
    line.choose(POOL, 4)
    (rows,) = line.unstored(POOL, ())
    (again,) = line.unstored(POOL, ())
    assert again.tolist() == rows.tolist(), "to be shown is not to be tried"
    line.begun(rows)
    assert list(line.unstored(POOL, ())) == []
    assert [taken.tolist() for taken in line.take(POOL, 4)] == [rows.tolist()]


def test_what_has_got_blocks_below_it_since_is_not_taken(node: Node, one: Engine) -> None:
    state = node.cache.state
    short = one.put("run", 0, *range(3))
    one.acquire(chain("run", 0, *range(3), "more"))
    node.cache.sessions.transport_lost(one.session.session_id)
    other = Engine(node, node.open_session("red", "two"), one.ref)
    line = NextToGo(state)
    line.choose(POOL, 100)
    everything: set[int] = set()
    for _ in range(2):  # some nodes at a time
        everything.update(row for rows in line.unstored(POOL, ()) for row in rows.tolist())
    assert set(rows_of(node, one, short).tolist()) <= everything
    for claimed in (everything, everything, (), ()):
        assert list(line.unstored(POOL, claimed)) == []
    other.put("run", 0, *range(3), "more")
    for rows in line.take(POOL, 100):
        state.apply(CopiesEvicted(Tier.DRAM, rows))
    assert other.hits(chain("run", 0, *range(3), "more")) == len(short) + 1
    assert node.cache.check() == []


def test_by_age_what_is_left_of_a_node_is_chosen_before_what_is_newer(node: Node, one: Engine) -> None:
    node.cache.set_policy("lru")
    oldest = set(rows_of(node, one, chain("run", 0, *range(3))).tolist())
    line = NextToGo(node.cache.state)
    line.choose(POOL, 1)
    line.choose(POOL, 6)  # beyond the rest of the oldest run, which is in line in part
    claimed = {row for rows in line.unstored(POOL, ()) for row in rows.tolist()}
    assert 0 < len(claimed & oldest) < len(oldest)
    for rows in (claimed, ()):
        assert list(line.unstored(POOL, rows)) == []
    for taken in line.take(POOL, 6):
        node.cache.state.apply(CopiesEvicted(Tier.DRAM, taken))
    line.choose(POOL, 2)
    chosen = {row for rows in line.unstored(POOL, ()) for row in rows.tolist()}
    assert chosen
    assert chosen <= oldest


def test_another_policy_chooses_anew(node: Node, one: Engine) -> None:
    line = NextToGo(node.cache.state)
    line.choose(POOL, 8)
    node.cache.set_policy("lru")
    line.choose(POOL, 4)
    assert line.block_count(POOL) == 4


def test_a_batch_is_ordered_by_worth_and_a_child_is_worth_no_more_than_its_parent(
    node: Node, one: Engine
) -> None:
    state = node.cache.state
    trunk = one.put("trunk")
    one.acquire(trunk)
    old = one.put("trunk", "old")
    node.clock.advance(5.0)
    new = one.put("trunk", "new")
    nodes = state.catalog.tree.nodes
    batch = np.concatenate(
        [rows_of(node, one, trunk), rows_of(node, one, old[1:]), rows_of(node, one, new[1:])]
    )
    at = state.catalog.columns.node[batch]
    nodes.gap_class[at[2]] = history_byte(gap_code(5.0), reused=True)
    ordered, parts = by_worth(state, batch)
    assert ordered[0] == batch[0]
    worths = [worth for _, worth in parts]
    assert worths == sorted(worths, reverse=True)
    assert sum(count for count, _ in parts) == len(batch)
    state.policy = state.policies["lru"]
    same, parts = by_worth(state, batch)
    assert (same.tolist(), parts) == (batch.tolist(), [(3, AT_ANY_PRICE)])
