"""Workloads that no constant was chosen on: never far behind LRU, and ahead where LRU is wrong."""

from __future__ import annotations

from functools import cache

import pytest
from prefixd_server.simulate.policies import TREE
from prefixd_server.simulate.replay import Replay
from prefixd_server.simulate.study import capacity_of

from tests.support.workloads import documents, loop, recent, shifting, with_scans, zipf

WORKLOADS = {
    "loop": loop(150, 900),
    "zipf": zipf(700, 1500, seed=1),
    "zipf with scans": with_scans(zipf(300, 1200, seed=2), every=25, length=25),
    "popularity that shifts": shifting(500, 1500, phase_count=4, seed=3),
    "recency": recent(1500, depth=40, seed=4),
}


@cache
def hit_percent(name: str, policy: str, fraction: float) -> float:
    trace = documents(WORKLOADS[name], seed=7)
    capacity = capacity_of(trace, fraction)
    hits = Replay(trace, TREE[policy](trace, capacity), capacity, seed=1).run()
    return float(100 * hits.sum() / trace.reference_count)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("fraction", [0.05, 0.4])
def test_importance_is_at_most_half_a_point_behind_lru(name: str, fraction: float) -> None:
    assert hit_percent(name, "importance", fraction) >= hit_percent(name, "lru", fraction) - 0.5


@pytest.mark.parametrize(("name", "fraction", "gain"), [("loop", 0.4, 10.0), ("zipf with scans", 0.05, 2.0)])
def test_importance_gains_where_recency_misleads(name: str, fraction: float, gain: float) -> None:
    assert hit_percent(name, "importance", fraction) >= hit_percent(name, "lru", fraction) + gain
