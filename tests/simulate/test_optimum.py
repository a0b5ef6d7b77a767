"""The optimum against all ways to keep blocks, and against every policy."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from prefixd_server.simulate.baselines.flat import replay_flat
from prefixd_server.simulate.optimum import optimal_hits
from prefixd_server.simulate.policies import FLAT, TREE
from prefixd_server.simulate.replay import Replay

from tests.support.requests import conversations, trace_of


def best_by_force(runs: list[list[int]], capacity: int) -> int:
    """Most prefix-hit blocks over all choices of what to keep after each request; closure is not required."""

    @cache
    def best(request: int, kept: frozenset[int]) -> int:
        if request == len(runs):
            return 0
        hit = 0
        while hit < len(runs[request]) and runs[request][hit] in kept:
            hit += 1
        known = sorted(kept | set(runs[request]))
        most = 0
        for mask in range(1 << len(known)):
            chosen = frozenset(block for i, block in enumerate(known) if mask >> i & 1)
            if len(chosen) <= capacity:
                most = max(most, best(request + 1, chosen))
        return hit + most

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_it_hits_exactly_what_the_best_of_all_choices_hits(seed: int, capacity: int) -> None:
    trace = conversations(seed, 5, turn_blocks_max=1)
    runs = [trace.run(request).tolist() for request in range(trace.request_count)]
    assert int(optimal_hits(trace, capacity).sum()) == best_by_force(runs, capacity)


@pytest.mark.parametrize("name", [*TREE, *FLAT])
@pytest.mark.parametrize("capacity", [8, 40])
def test_no_policy_hits_more(name: str, capacity: int) -> None:
    trace = conversations(7, 400)
    if name in FLAT:
        hits = replay_flat(trace, FLAT[name](capacity))
    else:
        hits = Replay(trace, TREE[name](trace, capacity), capacity, seed=1).run()
    assert 0 < hits.sum() <= optimal_hits(trace, capacity).sum()


def test_with_room_for_all_it_hits_all_that_came_before() -> None:
    trace = trace_of([[0, 1, 2], [0, 1, 3], [0, 1, 2, 4]])
    assert optimal_hits(trace, 5).tolist() == [0, 2, 3]
    assert optimal_hits(trace, 0).tolist() == [0, 0, 0]


def test_it_keeps_what_returns_first() -> None:
    trace = trace_of([[0], [1], [2], [1], [0], [2]])
    assert np.flatnonzero(optimal_hits(trace, 1)).tolist() == [3]
