"""Leaf-first LRU against flat LRU over blocks, touched from the tail to the head."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixd_server.base.types import NO_ROW, Tier
from prefixd_server.policy.lru import LruPolicy

from tests.support.forest import Forest

DRAM = Tier.DRAM
RNG = np.random.default_rng(0)


def all_copies(forest: Forest):
    return lambda node, limit: min(int(forest.tree.tiers[DRAM].copies[node]), limit)


def evict(forest: Forest, count: int) -> list[int]:
    """Asks the policy for victims and takes them; the rows, in order."""
    view = forest.tree.view(DRAM, 0, all_copies(forest))
    gone: list[int] = []
    for node, copies in LruPolicy().victims(view, count, 0.0, RNG):
        rows = forest.tree.tail_rows(DRAM, node, copies)
        assert len(rows) == copies
        gone += rows.tolist()
        forest.forget(rows)
    return gone


class Cache:
    """Requests over named blocks, in the tree and in a flat LRU list."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.forest = Forest(spaces=(0,))
        self.row_of: dict[str, int] = {}
        self.flat: OrderedDict[str, None] = OrderedDict()

    def request(self, blocks: list[str], now: float) -> tuple[int, int]:
        """Hits in the tree and in the flat list."""
        blocks = blocks[: self.capacity]
        hit = 0
        while hit < len(blocks) and blocks[hit] in self.row_of:
            hit += 1
        run = np.array([self.row_of[b] for b in blocks[:hit]], dtype=np.int32)
        if hit:
            self.forest.tree.touch(run, now)
        if hit < len(blocks):
            short = len(self.row_of) + len(blocks) - hit - self.capacity
            gone = set(evict(self.forest, short)) if short > 0 else set()
            assert len(gone) == max(short, 0)
            self.row_of = {b: r for b, r in self.row_of.items() if r not in gone}
            parent = int(run[-1]) if hit else NO_ROW
            rows = self.forest.add(0, parent, len(blocks) - hit, now, (DRAM,))
            self.row_of |= dict(zip(blocks[hit:], rows.tolist(), strict=True))
        flat_hit = 0
        while flat_hit < len(blocks) and blocks[flat_hit] in self.flat:
            flat_hit += 1
        for block in reversed(blocks):
            self.flat[block] = None
            self.flat.move_to_end(block)
        while len(self.flat) > self.capacity:
            self.flat.popitem(last=False)
        return hit, flat_hit


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(3, 60),
    requests=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=60),
    ticks=st.integers(1, 4),
)
def test_it_equals_flat_lru_that_touches_runs_tail_first(
    capacity: int, requests: list[list[int]], ticks: int
) -> None:
    cache = Cache(capacity)
    for number, choices in enumerate(requests):
        # A block's name is its whole prefix; several requests share one time.
        blocks = ["".join(map(str, choices[: i + 1])) for i in range(len(choices))]
        hit, flat_hit = cache.request(blocks, now=float(number // ticks))
        assert hit == flat_hit
        assert set(cache.row_of) == set(cache.flat)
    cache.forest.verify()


def test_one_call_goes_on_into_parents_whose_children_all_go() -> None:
    forest = Forest(spaces=(0,))
    trunk = forest.add(0, NO_ROW, 3, now=1.0, tiers=(DRAM,))
    left = forest.add(0, int(trunk[-1]), 2, now=1.0, tiers=(DRAM,))
    forest.tree.touch(trunk, 2.0)
    right = forest.add(0, int(trunk[-1]), 2, now=2.0, tiers=(DRAM,))
    young = forest.add(0, NO_ROW, 5, now=3.0, tiers=(DRAM,))
    assert evict(forest, 8) == [*left[::-1], *right[::-1], *trunk[::-1], young[-1]]


def test_what_may_not_go_keeps_its_ancestors_and_nothing_else() -> None:
    forest = Forest(spaces=(0,))
    trunk = forest.add(0, NO_ROW, 3, now=1.0, tiers=(DRAM,))
    forest.tree.touch(trunk, 1.0)
    held = forest.add(0, int(trunk[-1]), 2, now=1.0, tiers=(DRAM,))
    free = forest.add(0, NO_ROW, 2, now=2.0, tiers=(DRAM,))
    held_node, free_node = int(forest.columns.node[held[0]]), int(forest.columns.node[free[0]])
    view = forest.tree.view(DRAM, 0, lambda node, limit: 1 if node == held_node else min(limit, 2))
    assert LruPolicy().victims(view, 10, 0.0, RNG) == [(held_node, 1), (free_node, 2)]


@pytest.mark.parametrize("count", [0, -3])
def test_nothing_is_chosen_when_nothing_is_asked_for(count: int) -> None:
    forest = Forest(spaces=(0,))
    forest.add(0, NO_ROW, 3, now=1.0, tiers=(DRAM,))
    assert LruPolicy().victims(forest.tree.view(DRAM, 0, all_copies(forest)), count, 0.0, RNG) == []


def test_a_pool_without_spaces_has_no_victims() -> None:
    forest = Forest(spaces=(0,))
    view = forest.tree.view(DRAM, 99, all_copies(forest))
    assert view.leaf_count == 0
    assert LruPolicy().victims(view, 5, 0.0, RNG) == []


def test_the_oldest_can_be_evicted_while_they_are_listed() -> None:
    forest = Forest(spaces=(0,))
    runs = [forest.add(0, NO_ROW, 2, now=float(i), tiers=(DRAM,)) for i in range(6)]
    nodes = [int(forest.columns.node[run[0]]) for run in runs]
    view = forest.tree.view(DRAM, 0, all_copies(forest))
    seen = []
    for node in view.oldest():
        seen.append(node)
        if node == nodes[1]:
            forest.forget(np.concatenate([runs[1], runs[2]]))
        if len(seen) > 10:
            break
    assert seen == [nodes[0], nodes[1], nodes[0], nodes[3], nodes[4], nodes[5]]
