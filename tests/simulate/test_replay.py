"""Replays of one tier: exact LRU, pinned chains, and no knowledge of the future."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from prefixd_server.base.types import StopReason
from prefixd_server.policy.importance import ImportancePolicy
from prefixd_server.policy.lru import LruPolicy
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.policies import TREE
from prefixd_server.simulate.replay import Replay
from prefixd_server.simulate.traces import Trace

from tests.support.requests import conversations, trace_of


def flat_lru_hits(trace: Trace, capacity: int) -> list[int]:
    """LRU over blocks where each run is touched from its tail to its head; own blocks are pinned."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in range(trace.request_count):
        run = trace.run(request).tolist()
        hit = 0
        while hit < len(run) and run[hit] in kept:
            hit += 1
        hits.append(hit)
        for block in run[:hit]:
            del kept[block]
        room = capacity - hit
        while len(kept) > max(0, room - (len(run) - hit)):
            kept.popitem(last=False)
        for block in reversed(run[:capacity]):
            kept[block] = None
    return hits


@pytest.mark.parametrize("capacity", [5, 20, 80])
def test_lru_equals_a_flat_list_touched_tail_first(capacity: int) -> None:
    trace = conversations(3, 500)
    assert Replay(trace, LruPolicy(), capacity, seed=1).run().tolist() == flat_lru_hits(trace, capacity)


@pytest.mark.parametrize("name", TREE)
def test_what_is_kept_is_closed_consistent_and_never_too_much(name: str) -> None:
    trace = conversations(5, 300)
    replay = Replay(trace, TREE[name](trace, 30), 30, seed=1)
    for request, now in enumerate(trace.arrival_s.tolist()):
        replay.request(request, now)
        assert replay.columns.count <= 30
        if request % 25 == 0:
            assert replay.tree.check() == []
    assert replay.stored_count - replay.evicted_count == replay.columns.count


def test_a_run_longer_than_the_tier_keeps_its_beginning() -> None:
    trace = trace_of([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
    assert Replay(trace, LruPolicy(), 4, seed=1).run().tolist() == [0, 4]


@pytest.mark.parametrize("seed", range(3))
def test_the_future_changes_nothing_before_it(seed: int) -> None:
    """All that is to come is shuffled: replies still running, and the requests to come with their times."""
    trace, capacity, cut = conversations(11, 600), 40, 400
    rng = np.random.default_rng(seed)
    serving = ServingModel()
    present = trace.arrival_s[cut - 1]
    # A reply is known when it has ended; the earliest end counts every block as a hit.
    ends = trace.arrival_s + serving.ttft_base_s + trace.output_tokens * serving.tpot_s
    unknown = np.flatnonzero(ends > present)
    later = np.arange(cut, trace.request_count)
    outputs, stops = trace.output_tokens.copy(), list(trace.stops)
    # Longer replies stay unknown at `present`; their order and ends are new.
    outputs[unknown] = outputs[unknown] + rng.integers(1, 5000, len(unknown))
    kinds = list(StopReason)
    for request in unknown.tolist():
        stops[request] = kinds[int(rng.integers(len(kinds)))]
    order = np.concatenate([np.arange(cut), rng.permutation(later)])
    arrivals = trace.arrival_s.copy()
    arrivals[cut:] = present + np.cumsum(rng.permutation(np.diff(trace.arrival_s[cut - 1 :])))
    runs = [trace.run(int(request)).tolist() for request in order]
    shuffled = replace(
        trace_of(runs, arrivals.tolist(), outputs[order].tolist(), [stops[i] for i in order.tolist()]),
        block_count=trace.block_count,
    )
    one = Replay(trace, ImportancePolicy(), capacity, seed=1, serving=serving)
    other = Replay(shuffled, ImportancePolicy(), capacity, seed=1, serving=serving)
    for request in range(cut):
        now = float(trace.arrival_s[request])
        assert one.request(request, now) == other.request(request, now)
    assert one.columns.known.tolist() == other.columns.known.tolist()
    assert one.evicted_count == other.evicted_count > 0


def test_a_replay_is_the_same_for_the_same_seed() -> None:
    trace = conversations(2, 400)
    first, second = (Replay(trace, ImportancePolicy(), 40, seed=9).run().tolist() for _ in range(2))
    assert first == second
