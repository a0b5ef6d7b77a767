"""The shortlist: fewer looks, the same leaves, and nothing of it outlives what it was true of."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.types import NO_ROW, Tier
from prefixd_server.base.views import TierView
from prefixd_server.policy.choice import Choice
from prefixd_server.policy.policy import Victims
from prefixd_server.policy.shortlist import GOOD_FOR_S, SHARE, Scored, Shortlist

from tests.support.forest import Forest

DRAM = Tier.DRAM
NEVER = float("inf")
RUN_COUNT = 64
LISTED = int(SHARE * RUN_COUNT)


class Evicting:
    """Evicts by last use from runs of 3 blocks, one a second, with one shortlist."""

    def __init__(self) -> None:
        self.forest = Forest(spaces=(0,))
        self.runs = [self.forest.add(0, NO_ROW, 3, float(at), (DRAM,)) for at in range(RUN_COUNT)]
        self.shortlist = Shortlist()
        self.looks = 0
        self.view: TierView = self.forest.tree.view(
            DRAM, 0, lambda node, limit: min(int(self.view.copies[node]), limit)
        )

    def node_of(self, number: int) -> int:
        return int(self.forest.columns.node[self.runs[number][0]])

    def _look(self) -> Scored:
        self.looks += 1
        nodes = self.view.leaves()
        return nodes, self.view.last_use.take(nodes)

    def choose(self, block_count: int, now: float, ceiling: float = NEVER) -> Victims:
        choice = Choice(self.view, block_count)
        self.shortlist.take(choice, self._look, lambda node: float(self.view.last_use[node]), ceiling, now)
        return choice.victims

    def evict(self, block_count: int, now: float) -> list[int]:
        """The runs that lost something."""
        victims = self.choose(block_count, now)
        owner = {self.node_of(number): number for number in range(RUN_COUNT)}
        for node, count in victims:
            self.forest.drop(DRAM, self.forest.tree.tail_rows(DRAM, node, count))
        return [owner[node] for node, _ in victims]


def test_one_look_serves_until_what_it_listed_is_used_up() -> None:
    one = Evicting()
    gone = [number for _ in range(LISTED) for number in one.evict(3, now=100.0)]
    assert gone == list(range(LISTED))
    assert one.looks == 1
    assert one.evict(3, now=100.0) == [LISTED]
    assert one.looks == 2


def test_what_stays_of_a_leaf_goes_next() -> None:
    one = Evicting()
    assert [one.evict(2, now=100.0) for _ in range(3)] == [[0], [0, 1], [1]]
    assert one.looks == 1


def test_what_was_used_since_or_has_something_below_it_is_passed_over() -> None:
    one = Evicting()
    assert one.evict(3, now=100.0) == [0]
    one.forest.tree.touch(one.runs[1], 100.0)
    one.forest.add(0, int(one.runs[2][-1]), 1, 100.0, (DRAM,))
    assert one.evict(3, now=100.0) == [3]
    assert one.looks == 1


def test_after_a_while_it_looks_again() -> None:
    one = Evicting()
    one.evict(3, now=100.0)
    one.evict(3, now=100.0 + GOOD_FOR_S + 0.1)
    assert one.looks == 2


def test_what_is_above_the_ceiling_stays_and_is_still_listed() -> None:
    one = Evicting()
    assert [node for node, _ in one.choose(100, 100.0, ceiling=2.0)] == [one.node_of(0), one.node_of(1)]
    assert one.choose(3, 100.0, ceiling=2.0) == []
    assert one.choose(3, 100.0) == [(one.node_of(2), 3)]
    assert one.looks == 1


def test_a_list_of_all_leaves_is_not_kept() -> None:
    one = Evicting()
    assert sum(count for _, count in one.choose(3 * RUN_COUNT, 100.0)) == 3 * RUN_COUNT
    looks = one.looks
    one.evict(3, now=100.0)
    assert one.looks == looks + 1


@pytest.mark.parametrize("seed", range(4))
def test_a_parent_goes_after_all_below_it_in_the_order_of_scores(seed: int) -> None:
    """Whatever is asked for at once, over trees, against one that looks at all each time."""
    rng = np.random.default_rng(seed)
    one, other = Evicting(), Evicting()
    for at in range(RUN_COUNT):
        number, depth = int(rng.integers(RUN_COUNT)), int(rng.integers(3))
        for each in (one, other):
            each.forest.add(0, int(each.runs[number][depth]), 2, 100.0 + at, (DRAM,))
    while one.view.leaf_count:
        wanted = int(rng.integers(1, 6))
        other.shortlist = Shortlist()
        chosen = one.choose(wanted, 200.0)
        assert chosen == other.choose(wanted, 200.0)
        for each in (one, other):
            for node, count in chosen:
                each.forest.drop(DRAM, each.forest.tree.tail_rows(DRAM, node, count))
    assert one.looks < other.looks
