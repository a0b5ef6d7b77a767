"""What a check finds: all that does not agree, and nothing else, also while things change meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest
from prefixd_server.cache import checking
from prefixd_server.catalog import passes

from tests.support.churn import Churn, engine_of
from tests.support.damages import DAMAGES, TIER, a_node, change, presence
from tests.support.node import MIB, Node, chain, packed, start_node


@pytest.fixture
def node() -> Iterator[Node]:
    """Runs that share beginnings, one that waits for its parent, leases, free rows and nodes."""
    with closing(start_node(tenants=("red",), dram_bytes=4 * MIB)) as made:
        engine = engine_of(made)
        for number in range(6):
            engine.put("shared", *range(8), ("own", number), *range(5))
        gone = engine.put("gone", 1, 2, 3)
        made.cache.evict("red", engine.ref, packed(gone), 0)
        engine.acquire(chain("shared", *range(8)))
        unwritten, waiting = chain("unwritten", "waits")
        engine.reserve([unwritten])
        engine.commit(engine.reserve([waiting], parent=unwritten), [waiting])
        assert made.cache.state.catalog.waiting_count == 1
        assert made.cache.check() == []
        yield made


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(node: Node, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(node.cache.state.catalog)
    assert any(words in problem for problem in node.cache.check())


def test_a_lease_that_is_not_counted_is_found(node: Node) -> None:
    (lease,) = node.cache.state.leases.reads.values()
    (piece,) = lease.shards[0].pieces
    node.cache.state.catalog.slots[TIER].leases[piece.slots[:1]] -= 1
    assert f"{TIER.name}: a slot has more leases than it counts" in node.cache.check()


def test_hits_and_misses_that_do_not_add_up_are_found(node: Node) -> None:
    node.cache.state.counters_of("red").asked += 1
    assert node.cache.check() == ["tenant red: hits + pending + misses differ from blocks asked for"]


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_found_where_all_agrees_however_much_changes_between_the_steps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(start_node(tenants=("red",), dram_bytes=4 * MIB)) as node:
        churn = Churn(node, seed)
        for _ in range(60):
            churn.turn()
        assert node.cache.check() == []
        monkeypatch.setattr(passes, "STRETCH", 8)
        turns = 0
        for problems in node.cache.state.catalog.steps():
            assert problems == []
            churn.turn()
            turns += 1
        assert turns > 200
        assert node.cache.check() == []


def test_at_leisure_the_same_is_found_and_others_have_their_turns(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "PACE_S", 0.0)
    node.cache.state.counters_of("red").asked += 1
    change(presence("kids"), a_node, 1)(node.cache.state.catalog)

    async def beside() -> tuple[list[str], int]:
        check = asyncio.ensure_future(node.cache.check_at_leisure())
        turns = 0
        while not check.done():
            await asyncio.sleep(0)
            turns += 1
        return check.result(), turns

    found, turns = node.loop.run_until_complete(beside())
    assert found == node.cache.check()
    assert {
        "tree: DRAM: a node's kids are miscounted",
        "tenant red: hits + pending + misses differ from blocks asked for",
    } < set(found)
    assert turns > 20


def test_of_very_many_problems_some_are_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "PROBLEM_COUNT_MAX", 3)
    for tenant in range(10):
        node.cache.state.counters_of(f"tenant {tenant}").asked += 1
    assert len(node.loop.run_until_complete(node.cache.check_at_leisure())) == 3
