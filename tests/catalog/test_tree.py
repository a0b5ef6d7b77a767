"""The prefix tree's shape: nodes, splits, walks, removal."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.types import NO_ROW, Tier
from prefixd_server.catalog.nodes import NODE_LENGTH_MAX

from tests.support.forest import Forest

DRAM, NVME = Tier.DRAM, Tier.NVME


@pytest.fixture
def forest() -> Forest:
    return Forest()


def test_a_chain_is_one_node_and_grows_while_its_history_is_the_same(forest: Forest) -> None:
    first = forest.add(0, NO_ROW, 5, now=1.0)
    more = forest.add(0, int(first[-1]), 4, now=2.0)
    assert len(set(forest.columns.node[np.concatenate([first, more])].tolist())) == 1
    assert forest.columns.depth[more].tolist() == [5, 6, 7, 8]
    forest.verify()


def test_a_chain_below_a_used_node_is_a_node_of_its_own(forest: Forest) -> None:
    first = forest.add(0, NO_ROW, 5, now=1.0)
    forest.tree.touch(first, 2.0)
    more = forest.add(0, int(first[-1]), 4, now=2.0)
    assert forest.columns.node[more[0]] != forest.columns.node[first[0]]
    forest.verify()


def test_a_branch_splits_the_node_it_leaves(forest: Forest) -> None:
    trunk = forest.add(0, NO_ROW, 10, now=1.0, tiers=(DRAM,))
    lower = forest.columns.node[trunk[9]]
    branch = forest.add(0, int(trunk[3]), 2, now=2.0, tiers=(DRAM,))
    nodes = forest.columns.node
    assert nodes[trunk[9]] == lower, "the lower part keeps its number"
    assert len({nodes[trunk[0]], nodes[trunk[9]], nodes[branch[0]]}) == 3
    assert nodes[trunk[3]] == nodes[trunk[0]]
    assert sorted(forest.tree.children(int(trunk[3])).tolist()) == sorted([int(trunk[4]), int(branch[0])])
    forest.verify()


def test_a_use_that_ends_inside_a_node_splits_it_and_counts_only_the_upper_part(forest: Forest) -> None:
    rows = forest.add(0, NO_ROW, 10, now=1.0, tiers=(DRAM,))
    forest.tree.attention[forest.columns.node[rows[0]]] = 10.0
    (upper,) = forest.tree.touch(rows[:4], 5.0)
    lower = forest.columns.node[rows[4]]
    tree = forest.tree
    assert (tree.use_count[upper], tree.use_count[lower]) == (2, 1)
    assert (tree.last_use[upper], tree.last_use[lower]) == (5.0, 1.0)
    assert (tree.nodes.reused[upper], tree.nodes.reused[lower]) == (1, 0)
    assert (tree.attention[upper], tree.attention[lower]) == (4.0, 6.0)
    forest.verify()


def test_a_node_has_at_most_its_greatest_length(forest: Forest) -> None:
    rows = forest.add(0, NO_ROW, 2 * NODE_LENGTH_MAX + 10, now=1.0, tiers=(DRAM,))
    assert forest.tree.nodes.length[forest.columns.node[rows]].max() == NODE_LENGTH_MAX
    more = forest.add(0, int(rows[-1]), NODE_LENGTH_MAX, now=1.0, tiers=(DRAM,))
    assert forest.tree.nodes.length[forest.columns.node[more]].max() == NODE_LENGTH_MAX
    assert forest.tree.path(int(more[-1])).tolist() == [*rows.tolist(), *more.tolist()]
    forest.verify()


def test_adding_is_a_sign_of_life_of_the_path_above(forest: Forest) -> None:
    old = forest.add(0, NO_ROW, 4, now=1.0, tiers=(DRAM,))
    forest.tree.touch(old, 2.0)
    other = forest.add(0, NO_ROW, 4, now=3.0, tiers=(DRAM,))
    forest.add(0, int(old[-1]), 1, now=9.0, tiers=(DRAM,))
    node = forest.columns.node
    assert forest.tree.last_use[node[old[0]]] == 9.0
    assert forest.tree.use_count[node[old[0]]] == 2
    order = list(forest.tree.view(DRAM, 0, lambda node, limit: limit).by_age())
    assert order.index(node[other[0]]) < order.index(node[old[0]])
    forest.verify()


def test_removal_shortens_nodes_and_frees_empty_ones(forest: Forest) -> None:
    rows = forest.add(0, NO_ROW, 10, now=1.0, tiers=(DRAM,))
    nodes_before = forest.tree.nodes.count
    forest.forget(rows[7:])
    assert forest.tree.nodes.count == nodes_before
    forest.verify()
    forest.forget(rows[:7])
    assert forest.tree.nodes.count == nodes_before - 1
    assert forest.tree.block_count(0) == 0
    forest.verify()


def test_rows_are_removed_in_any_order(forest: Forest) -> None:
    trunk = forest.add(0, NO_ROW, 10, now=1.0, tiers=(DRAM,))
    left = forest.add(0, int(trunk[4]), 6, now=2.0, tiers=(DRAM, NVME))
    right = forest.add(0, int(trunk[4]), 6, now=2.0, tiers=(DRAM,))
    rows = np.concatenate([right, trunk[2:], left])
    forest.forget(np.random.default_rng(1).permutation(rows))
    assert forest.tree.subtree(int(trunk[0])).tolist() == trunk[:2].tolist()
    forest.verify()


def test_tail_rows_come_deepest_first_and_skip_what_has_no_copy(forest: Forest) -> None:
    rows = forest.add(0, NO_ROW, 200, now=1.0, tiers=(DRAM, NVME))
    forest.drop(DRAM, rows[150:])
    forest.drop(DRAM, rows[100:110])
    node = int(forest.columns.node[rows[0]])
    held = [*rows[:100].tolist(), *rows[110:150].tolist()][::-1]
    for limit in (0, 1, 30, 41, 139, 140, 500):
        assert forest.tree.tail_rows(DRAM, node, limit).tolist() == held[:limit]
    assert forest.tree.tail_rows(NVME, node, 3).tolist() == rows[:-4:-1].tolist()


def test_walks_do_not_depend_on_consecutive_rows(forest: Forest) -> None:
    scattered = forest.add(0, NO_ROW, 400, now=1.0)
    keep = forest.add(1, NO_ROW, 10, now=1.0)
    forest.forget(scattered[200:])
    forest.forget(scattered[:200])
    forest.columns._freed[: forest.columns._freed_count] = np.random.default_rng(1).permutation(
        forest.columns._freed[: forest.columns._freed_count]
    )
    a = forest.add(1, int(keep[-1]), 150, now=2.0)
    b = forest.add(0, NO_ROW, 100, now=2.0)
    assert np.diff(a).max() > 1
    assert forest.tree.path(int(a[-1])).tolist() == [*keep.tolist(), *a.tolist()]
    assert forest.tree.subtree(int(b[40])).tolist() == b[40:].tolist()
    forest.tree.touch(b[:60], 3.0)
    forest.verify()


def test_some_of_a_space_can_be_forgotten_bit_by_bit_until_it_can_be_dropped(forest: Forest) -> None:
    trunk = forest.add(2, NO_ROW, 30, now=1.0, tiers=(DRAM,))
    for start in (5, 10, 10, 20):
        forest.add(2, int(trunk[start]), 7, now=2.0, tiers=(DRAM,))
    forest.add(2, NO_ROW, 3, now=2.0, tiers=(DRAM,))
    while len(rows := forest.tree.some_of(2, 4)):
        assert len(rows) <= 4
        forest.forget(rows)
        forest.verify()
    assert forest.tree.block_count(2) == 0
    forest.tree.drop_space(2)
    assert forest.tree.block_count(2) == 0
    assert forest.tree.roots(2).tolist() == []
    forest.tree.drop_space(2)
    forest.verify()


def test_roots_are_the_first_blocks_of_a_space(forest: Forest) -> None:
    firsts = {int(forest.add(1, NO_ROW, 3, now=1.0)[0]) for _ in range(4)}
    forest.add(0, NO_ROW, 3, now=1.0)
    assert set(forest.tree.roots(1).tolist()) == firsts


def test_a_row_ends_with_a_tier_when_nothing_below_is_kept_elsewhere(forest: Forest) -> None:
    trunk = forest.add(0, NO_ROW, 5, now=1.0, tiers=(DRAM,))
    below = forest.add(0, int(trunk[2]), 2, now=2.0, tiers=(DRAM,))
    assert forest.tree.ends_with(DRAM, int(trunk[2]))
    assert not forest.tree.ends_with(DRAM, int(trunk[1]))
    forest.copy(NVME, below)
    assert not forest.tree.ends_with(DRAM, int(trunk[2]))


def test_memory_follows_nodes_in_use(forest: Forest) -> None:
    assert forest.tree.touched_bytes < 40 * 64 * 1024
    for _ in range(3000):
        forest.add(0, NO_ROW, 1, now=1.0, tiers=(DRAM,))
    assert 3000 * 110 < forest.tree.touched_bytes < 3000 * 130 + 40 * 64 * 1024
