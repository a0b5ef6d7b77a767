"""What DRAM drops next: chosen once and copied first; then the least important goes, in order of worth."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import pytest
from prefixd_server.base.types import NO_SLOT, Rows, Tier
from prefixd_server.cache.next_to_go import PASS_COUNT_MAX, NextToGo
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


def node_of(node: Node, engine: Engine, hashes: list[bytes]) -> int:
    return int(node.cache.state.catalog.columns.node[rows_of(node, engine, hashes)[-1]])


def store(catalog: Catalog, rows: Rows) -> None:
    """As if NVMe had them."""
    catalog.columns.slot[Tier.NVME][rows] = 7
    catalog.tree.copies_added(Tier.NVME, rows)


def forget(catalog: Catalog, rows: Rows) -> None:
    """As if NVMe had them no more."""
    catalog.tree.copies_dropped(Tier.NVME, rows)
    catalog.columns.slot[Tier.NVME][rows] = NO_SLOT


def goes(node: Node, line: NextToGo, count: int) -> list[Rows]:
    """What an eviction would drop, by node."""
    state = node.cache.state
    view = state.catalog.tree.view(Tier.DRAM, POOL, line.ready(POOL))
    victims = state.policy.victims(view, count, state.clock.now(), state.rng)
    return [state.catalog.tree.tail_rows(Tier.DRAM, at, blocks) for at, blocks in victims]


def drop(node: Node, line: NextToGo, rows: Rows) -> None:
    """As room drops it."""
    state = node.cache.state
    line.dropped(POOL, int(state.catalog.columns.node[rows[0]]), len(rows))
    state.apply(CopiesEvicted(Tier.DRAM, rows))


def asked_for(node: Node, line: NextToGo, claimed: Container[int] = ()) -> list[int]:
    """Nodes that NVMe is to be asked to take."""
    columns = node.cache.state.catalog.columns
    return [int(columns.node[rows[-1]]) for rows in line.unstored(POOL, claimed)]


def test_a_node_is_chosen_once_and_the_line_is_as_long_as_asked(node: Node, one: Engine) -> None:
    line = NextToGo(node.cache.state)
    line.choose(POOL, 20)
    assert line.block_count(POOL) == 20
    first = asked_for(node, line)
    line.choose(POOL, 20)
    assert asked_for(node, line) == first
    line.choose(POOL, 40)
    later = asked_for(node, line)
    assert later[: len(first)] == first
    assert len(later) == len(set(later)) == 2 * len(first)


def test_what_is_used_again_leaves_the_line(node: Node, one: Engine) -> None:
    line = NextToGo(node.cache.state)
    line.choose(POOL, 8)
    oldest = one.put("run", 0, *range(3))
    one.acquire(oldest)
    assert node_of(node, one, oldest) not in asked_for(node, line)
    line.choose(POOL, 8)
    assert line.block_count(POOL) == 8


def test_what_nvme_is_asked_to_take_is_whole_and_comes_parents_first(node: Node, one: Engine) -> None:
    catalog = node.cache.state.catalog
    line = NextToGo(node.cache.state)
    line.choose(POOL, 8)
    (planned,) = line.plan(POOL, (), 100)
    assert sorted(catalog.columns.depth[planned].tolist()) == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    order = planned.tolist()
    for row in order[1:]:
        assert order.index(int(catalog.columns.parent[row])) < order.index(row)
    (rest,) = line.plan(POOL, set(order[:3]), 100)
    assert rest.tolist() == order[3:]


def test_what_is_still_to_be_copied_stays_and_what_nvme_has_goes_deepest_first(
    node: Node, one: Engine
) -> None:
    catalog = node.cache.state.catalog
    line = NextToGo(node.cache.state)
    line.choose(POOL, 100)
    rows = catalog.tree.node_rows(asked_for(node, line)[-1])
    store(catalog, rows)
    (taken,) = goes(node, line, 4)
    assert taken.tolist() == rows[::-1].tolist()
    forget(catalog, rows)


def test_room_beyond_what_is_needed_costs_no_block(node: Node, one: Engine) -> None:
    catalog, room = node.cache.state.catalog, node.cache.room
    room.next_to_go = line = NextToGo(node.cache.state)
    line.choose(POOL, 12)
    stored = np.concatenate([catalog.tree.node_rows(at) for at in asked_for(node, line)[1:]])
    store(catalog, stored)
    known = catalog.columns.count
    assert room.evict(Tier.DRAM, POOL, len(stored) // 2, slack=len(stored)) == len(stored)
    assert catalog.columns.count == known
    assert room.evict(Tier.DRAM, POOL, 4, slack=5) == 4
    assert catalog.columns.count == known - 4
    forget(catalog, stored)
    node.cache.state.apply(BlocksRemoved(stored))


def test_an_eviction_does_not_wait_for_many_copies(node: Node, one: Engine) -> None:
    node.cache.set_policy("lru")
    line = NextToGo(node.cache.state)
    assert len(goes(node, line, 100)) == 20 - PASS_COUNT_MAX


def test_what_was_asked_once_and_refused_may_go_without_a_copy(node: Node, one: Engine) -> None:
    node.cache.set_policy("lru")
    line = NextToGo(node.cache.state)
    line.choose(POOL, 8)
    first, second = asked_for(node, line)
    (planned,) = line.plan(POOL, (), 100)
    line.asked(planned[:1])  # the head of both is asked for, and on its way for now
    assert asked_for(node, line, set(planned[:1].tolist())) == [first, second]
    columns = node.cache.state.catalog.columns
    assert not {first, second} & {int(columns.node[rows[0]]) for rows in goes(node, line, 8)}
    store(node.cache.state.catalog, planned[:1])  # the head was taken: they are asked for from there on
    assert asked_for(node, line) == [first, second]
    line.asked(planned[1:3])
    assert asked_for(node, line) == [second], "refused before anybody could look"
    (gone,) = goes(node, line, 4)
    assert columns.node[gone].tolist() == [first] * 4
    forget(node.cache.state.catalog, planned[:1])


def test_what_has_got_blocks_below_it_since_does_not_go_before_them(node: Node, one: Engine) -> None:
    short = one.put("run", 0, *range(3))
    one.acquire(chain("run", 0, *range(3), "more"))
    node.cache.sessions.transport_lost(one.session.session_id)
    other = Engine(node, node.open_session("red", "two"), one.ref)
    line = NextToGo(node.cache.state)
    line.choose(POOL, 100)
    for _ in range(3):  # some nodes at a time
        for rows in line.plan(POOL, (), 100):
            line.asked(rows)
    assert node_of(node, one, short) not in asked_for(node, line)
    longer = other.put("run", 0, *range(3), "more")
    for rows in goes(node, line, 100):
        drop(node, line, rows)
    assert other.hits(longer) in {0, len(longer)}
    assert node.cache.check() == []


def test_by_age_what_is_left_of_a_node_is_chosen_before_what_is_newer(node: Node, one: Engine) -> None:
    node.cache.set_policy("lru")
    oldest = node_of(node, one, chain("run", 0, *range(3)))
    line = NextToGo(node.cache.state)
    line.choose(POOL, 2)
    (part,) = line.plan(POOL, (), 100)
    line.asked(part)
    assert asked_for(node, line) == []
    for rows in goes(node, line, 2):
        drop(node, line, rows)
    assert node.cache.state.catalog.tree.tiers[Tier.DRAM].copies[oldest] == 2
    line.choose(POOL, 2)
    assert asked_for(node, line) == [oldest]


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
