"""Choosing by importance: order, closure, ceilings, and what is learned from a made workload."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.types import NO_ROW, StopReason, Tier
from prefixd_server.policy.importance import SCAN_COUNT_MAX, ImportancePolicy
from prefixd_server.policy.learning import LearningPolicy
from prefixd_server.policy.lru import LruPolicy
from prefixd_server.policy.signals import NO_GAP, Signal, gap_code, history_byte, reply_byte

from tests.support.forest import Forest

DRAM = Tier.DRAM


def forest_of(run_count: int, run_blocks: int = 3) -> Forest:
    """Runs of their own, one a second."""
    forest = Forest(spaces=(0,))
    for number in range(run_count):
        forest.add(0, NO_ROW, run_blocks, float(number), (DRAM,))
    return forest


def view_of(forest: Forest):
    return forest.tree.view(
        DRAM, 0, lambda node, limit: min(int(forest.tree.tiers[DRAM].copies[node]), limit)
    )


def test_it_is_a_learning_policy_and_lru_is_not() -> None:
    assert isinstance(ImportancePolicy(), LearningPolicy)
    assert not isinstance(LruPolicy(), LearningPolicy)


@pytest.mark.parametrize("count", [1, 4, 9, 30])
def test_without_evidence_it_chooses_as_lru_does(count: int) -> None:
    view, rng = view_of(forest_of(40)), np.random.default_rng(1)
    assert ImportancePolicy().victims(view, count, 100.0, rng) == LruPolicy().victims(view, count, 100.0, rng)


def test_it_never_takes_more_than_asked_and_leaves_come_before_their_parents() -> None:
    forest = Forest(spaces=(0,))
    trunk = forest.add(0, NO_ROW, 4, 0.0, (DRAM,))
    forest.tree.touch(trunk, 1.0)
    for number in range(6):
        forest.add(0, int(trunk[-1]), 2, 2.0 + number, (DRAM,))
    view = view_of(forest)
    victims = ImportancePolicy().victims(view, 16, 50.0, np.random.default_rng(1))
    assert sum(count for _, count in victims) == 16
    trunk_node = int(forest.columns.node[trunk[0]])
    assert victims[-1] == (trunk_node, 4)
    assert len({node for node, _ in victims}) == len(victims)


def test_many_leaves_are_sampled_and_enough_is_found_all_the_same() -> None:
    view = view_of(forest_of(2 * SCAN_COUNT_MAX, run_blocks=1))
    victims = ImportancePolicy().victims(view, 500, 1e4, np.random.default_rng(1))
    assert sum(count for _, count in victims) == 500
    assert np.mean([node for node, _ in victims]) < SCAN_COUNT_MAX


def test_what_is_worth_more_than_the_new_block_stays() -> None:
    view, policy, rng = view_of(forest_of(10)), ImportancePolicy(), np.random.default_rng(1)
    new = history_byte(NO_GAP, reused=False)
    assert policy.victims_for(view, 9, new, 500.0, rng)
    policy.hazards.index[:] = 1.0
    place = new * 24 * 56
    policy.hazards.index[place] = 0.5
    # Everyone else is worth twice the newcomer.
    view.gap_class[view.leaves()] = history_byte(gap_code(10.0), reused=True)
    assert policy.victims_for(view, 9, new, 500.0, rng) == []


def test_leaves_that_may_not_go_are_passed_over() -> None:
    forest = forest_of(8)
    view = forest.tree.view(DRAM, 0, lambda node, limit: 0 if node % 2 else min(3, limit))
    victims = ImportancePolicy().victims(view, 100, 50.0, np.random.default_rng(1))
    assert victims
    assert all(node % 2 == 0 for node, _ in victims)


def test_the_signals_of_a_node_are_told_in_words() -> None:
    forest = forest_of(1)
    view = view_of(forest)
    node = int(view.leaves()[0])
    view.gap_class[node] = history_byte(gap_code(20.0), reused=True)
    view.output_class[node] = reply_byte(50, StopReason.TOOL_USE)
    told = ImportancePolicy().explain(view, node, 12.0)
    assert told["gap"] == "16 to 32 s"
    assert told["reply"] == "16 to 128 tokens"
    assert told["stop"] == "tool use"
    assert told["idle"] == "12.0 s"


def test_with_a_cost_new_blocks_are_weighed_by_their_own_depth() -> None:
    view, rng = view_of(forest_of(10)), np.random.default_rng(1)
    policy = ImportancePolicy(weight=lambda depths: 1.0 + depths.astype(np.float64))
    new = history_byte(NO_GAP, reused=False)
    policy.hazards.index[:] = 1.0
    # Leaves end at depth 2, so each is worth three times a new first block.
    assert policy.victims_for(view, 9, new, 50.0, rng) == []
    assert policy.victims_for(view, 9, new, 50.0, rng, depth=4)


def test_signals_that_are_ignored_tell_nothing_apart() -> None:
    policy = ImportancePolicy(ignored=tuple(Signal))
    hazards = policy.hazards
    known = np.full(500, history_byte(gap_code(20.0), reused=True) * 24 + reply_byte(50, StopReason.TOOL_USE))
    hazards.observe_reuses(known, np.full(500, 3))
    hazards.observe_exposure(known, np.full(500, 3), np.full(500, 9.0))
    hazards.rebuild(1.0)
    index = hazards.index.reshape(-1, 56)
    assert np.allclose(index, index[0])
    assert not np.allclose(ImportancePolicy().hazards.index.reshape(-1, 56)[0], index[0])
