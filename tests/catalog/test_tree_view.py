"""A view without some nodes: its walk by age goes on where the last one ended, and is short."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from prefixd_server.base.types import NO_ROW, Tier
from prefixd_server.catalog.nodes import NO_NODE
from prefixd_server.catalog.tree_view import BY_AGE_COUNT_MAX, PoolView
from prefixd_server.policy.lru import LruPolicy

from tests.support.forest import Forest

DRAM = Tier.DRAM


def chains(count: int) -> tuple[Forest, list[int]]:
    """Single blocks of pool 0, one a second, and their nodes."""
    forest = Forest()
    rows = [int(forest.add(0, NO_ROW, 1, float(at), (DRAM,))[0]) for at in range(count)]
    return forest, forest.columns.node[rows].tolist()


def view_of(forest: Forest, without: NDArray[np.bool_], after: int = NO_NODE) -> PoolView:
    return forest.tree.view(DRAM, 0, lambda node, limit: min(1, limit), without=without, after=after)


def none_of(forest: Forest) -> NDArray[np.bool_]:
    return np.zeros(forest.tree.nodes.row_count_max, dtype=np.bool_)


def test_it_begins_behind_the_node_that_was_reached_and_passes_over_what_is_left_out() -> None:
    forest, nodes = chains(8)
    without = none_of(forest)
    without[nodes[:4]] = without[nodes[5]] = True
    view = view_of(forest, without, after=nodes[3])
    walk = view.by_age()
    assert next(walk) == view.reached == nodes[4]
    assert next(walk) == view.reached == nodes[6]
    assert list(walk) == [nodes[7]]
    assert view.reached == NO_NODE


@pytest.mark.parametrize("elsewhere", ["without copies", "of another pool"])
def test_it_begins_at_the_old_end_behind_a_node_that_is_not_in_the_list(elsewhere: str) -> None:
    forest, nodes = chains(3)
    space = 2 if elsewhere == "of another pool" else 0
    rows = forest.add(space, NO_ROW, 1, 9.0, (DRAM,) if space else ())
    stranger = int(forest.columns.node[rows[0]])
    assert list(view_of(forest, none_of(forest), after=stranger).by_age()) == nodes


def test_one_walk_is_bounded_and_the_next_goes_on() -> None:
    forest, nodes = chains(BY_AGE_COUNT_MAX + 3)
    view = view_of(forest, none_of(forest))
    assert list(view.by_age()) == nodes[:BY_AGE_COUNT_MAX]
    assert list(view_of(forest, none_of(forest), after=view.reached).by_age()) == nodes[BY_AGE_COUNT_MAX:]


def test_lru_leaves_a_parent_whose_children_are_left_out() -> None:
    forest = Forest()
    trunk = forest.add(0, NO_ROW, 2, 0.0, (DRAM,))
    forest.tree.touch(trunk, 1.0)
    branch = forest.add(0, int(trunk[-1]), 1, 2.0, (DRAM,))
    later = forest.add(0, NO_ROW, 1, 3.0, (DRAM,))
    without = none_of(forest)
    without[forest.columns.node[branch]] = True
    victims = LruPolicy().victims(view_of(forest, without), 9, 5.0, np.random.default_rng(1))
    assert victims == [(int(forest.columns.node[later[0]]), 1)]


def test_the_path_without_a_tier_is_what_the_tier_lacks_in_run_order() -> None:
    forest = Forest()
    trunk = forest.add(0, NO_ROW, 20, 0.0, (DRAM,))
    branch = forest.add(0, int(trunk[9]), 20, 1.0, (DRAM,))
    twig = forest.add(0, int(branch[-1]), 3, 2.0, (DRAM,))
    run = np.concatenate([trunk[:10], branch, twig])
    assert forest.tree.path_without(Tier.NVME, int(twig[-1])).tolist() == run.tolist()
    forest.copy(Tier.NVME, run[:15])
    assert forest.tree.path_without(Tier.NVME, int(twig[1])).tolist() == run[15:-1].tolist()
    forest.copy(Tier.NVME, run[15:])
    assert forest.tree.path_without(Tier.NVME, int(twig[-1])).tolist() == []
