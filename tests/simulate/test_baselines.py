"""The established policies do what they are known for."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.simulate.baselines.flat import S3Fifo, WTinyLfu, replay_flat
from prefixd_server.simulate.baselines.tree import ArcTree, GdsfTree, TwoQTree
from prefixd_server.simulate.policies import TREE
from prefixd_server.simulate.replay import Replay
from prefixd_server.simulate.traces import Trace

from tests.support.requests import BLOCK_TOKENS, trace_of
from tests.support.workloads import documents, with_scans, zipf


def popular_and_once(rounds: int, once_per_round: int) -> Trace:
    """Two popular documents, twice a round each, and documents that nobody asks for again."""
    order: list[int] = []
    for number in range(rounds):
        order += [0, 1, 0, 1]
        order += [2 + number * once_per_round + i for i in range(once_per_round)]
    return documents(np.array(order), seed=1)


def hit_blocks(trace: Trace, policy: str, capacity: int) -> int:
    return int(Replay(trace, TREE[policy](trace, capacity), capacity, seed=1).run().sum())


@pytest.mark.parametrize("name", ["2q", "arc", "gdsf"])
def test_what_is_used_again_outlives_what_is_used_once(name: str) -> None:
    # Two documents fit beside one more, and LRU loses them in each round.
    trace = popular_and_once(rounds=30, once_per_round=6)
    assert hit_blocks(trace, name, 30) > 1.3 * hit_blocks(trace, "lru", 30)


@pytest.mark.parametrize("cache", [S3Fifo, WTinyLfu])
def test_flat_policies_resist_scans(cache: type[S3Fifo] | type[WTinyLfu]) -> None:
    trace = documents(with_scans(zipf(60, 1500, seed=2), every=25, length=25), seed=3)
    capacity = trace.block_count // 30
    assert replay_flat(trace, cache(capacity)).sum() > hit_blocks(trace, "lru", capacity)


@pytest.mark.parametrize("cache", [S3Fifo, WTinyLfu])
def test_flat_policies_keep_to_their_size(cache: type[S3Fifo] | type[WTinyLfu]) -> None:
    trace = documents(zipf(100, 400, seed=5), seed=6)
    kept = cache(50)
    for request in range(trace.request_count):
        for block in trace.run(request).tolist():
            kept.access(block)
        assert sum(block in kept for block in range(trace.block_count)) <= 50


def test_2q_remembers_what_left_probation() -> None:
    policy = TwoQTree(capacity_blocks=10)
    policy.evicted(np.array([3, 4, 5], dtype=np.int32), reused=False)
    policy.evicted(np.array([6], dtype=np.int32), reused=True)
    assert policy.missed(np.array([3, 4, 9, 6], dtype=np.int32)) == 2
    assert policy.missed(np.array([3], dtype=np.int32)) == 0


def test_arc_gives_room_to_the_list_whose_ghosts_are_asked_for() -> None:
    policy = ArcTree(capacity_blocks=10)
    policy.evicted(np.array([1, 2], dtype=np.int32), reused=False)
    policy.evicted(np.array([7], dtype=np.int32), reused=True)
    assert policy.missed(np.array([1], dtype=np.int32)) == 1
    assert policy._target == 1.0
    assert policy.missed(np.array([7], dtype=np.int32)) == 1
    assert policy._target == 0.0


def test_gdsf_does_not_price_anew_what_it_has_cut() -> None:
    """Of two documents used once, the older goes first to its last block."""
    trace = trace_of([[0, 1, 2, 3], [4, 5, 6, 7], [8], [9], [10], [11], [4, 5, 6, 7]])
    replay = Replay(trace, GdsfTree(BLOCK_TOKENS), 8, seed=1)
    assert replay.run().tolist()[-1] == 4
