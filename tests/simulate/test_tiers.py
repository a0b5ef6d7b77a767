"""Replays of several tiers: the books balance, nothing is lost that has room, links carry what moves."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.types import NO_SLOT, Tier
from prefixd_server.policy.importance import ImportancePolicy
from prefixd_server.policy.lru import LruPolicy
from prefixd_server.policy.policy import Policy
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.links import DRAM_NVME_READ, HBM_DRAM, Link, LinkRate
from prefixd_server.simulate.replay import Replay
from prefixd_server.simulate.tiers import TierReplay, TierSizes
from prefixd_server.simulate.traces import Trace

from tests.support.requests import conversations, trace_of

BLOCK_BYTES = 1 << 20
AT_ONCE = ServingModel(ttft_base_s=0.0, prefill_tokens_per_s=1e12, tpot_s=0.0)
"""Replies end as they begin, so nothing stays pinned."""
SIZES = [
    {Tier.DRAM: 40},
    {Tier.HBM: 20, Tier.DRAM: 40},
    {Tier.DRAM: 20, Tier.NVME: 80},
    {Tier.HBM: 10, Tier.DRAM: 20, Tier.NVME: 60},
]


def replay_of(trace: Trace, sizes: dict[Tier, int], policy: Policy, serving: ServingModel) -> TierReplay:
    return TierReplay(trace, policy, dict(sizes), BLOCK_BYTES, seed=1, serving=serving)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("policy", [ImportancePolicy, LruPolicy])
def test_the_books_balance_after_every_request(sizes: dict[Tier, int], policy: type[Policy]) -> None:
    trace = conversations(4, 250)
    replay = replay_of(trace, sizes, policy(), ServingModel())
    hits = np.zeros(trace.request_count, dtype=np.int64)
    for request, now in enumerate(trace.arrival_s.tolist()):
        hits[request] = replay.request(request, now)
        known = replay.columns.rows_in_use()
        for tier, capacity in sizes.items():
            kept = int((replay.columns.slot[tier][known] != NO_SLOT).sum())
            assert kept == replay.used[tier] <= capacity
        if request % 50 == 0:
            assert replay.tree.check() == []
    assert sum(replay.hit_blocks.values()) == hits.sum() > 0
    assert sum(replay.hit_tokens.values()) == pytest.approx(hits.sum() * trace.block_tokens)


def test_one_tier_without_running_requests_is_the_replay_of_one_tier() -> None:
    trace = conversations(6, 400)
    alone = Replay(trace, LruPolicy(), 40, seed=1).run()
    tier = replay_of(trace, {Tier.DRAM: 40}, LruPolicy(), AT_ONCE).run()
    assert tier.tolist() == alone.tolist()


def test_two_tiers_hit_at_least_what_the_larger_hits_alone() -> None:
    trace = conversations(6, 400)
    alone = replay_of(trace, {Tier.NVME: 80}, LruPolicy(), AT_ONCE).run().sum()
    both = replay_of(trace, {Tier.DRAM: 20, Tier.NVME: 80}, LruPolicy(), AT_ONCE).run().sum()
    assert both >= alone > 0


def test_new_blocks_go_to_the_next_tier_while_running_requests_hold_the_fastest() -> None:
    runs = [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    slow = ServingModel(tpot_s=100.0)
    replay = replay_of(trace_of(runs), {Tier.HBM: 4, Tier.DRAM: 8}, LruPolicy(), slow)
    assert replay.run().tolist() == [0, 0, 4]
    assert replay.hit_blocks == {Tier.HBM: 0, Tier.DRAM: 4}


def test_what_hits_below_is_waited_for_and_is_above_afterwards() -> None:
    runs = [[0, 1], [2, 3], [0, 1], [0, 1]]
    replay = replay_of(trace_of(runs), {Tier.HBM: 2, Tier.DRAM: 4}, LruPolicy(), AT_ONCE)
    assert replay.run().tolist() == [0, 0, 2, 2]
    assert replay.hit_blocks == {Tier.HBM: 2, Tier.DRAM: 2}
    crossing = HBM_DRAM.latency_s + 2 * BLOCK_BYTES / HBM_DRAM.bytes_per_s
    # The GPU's own link was free again by the third request.
    assert replay.ttft_s[2] == pytest.approx(crossing)
    assert replay.ttft_s[3] == pytest.approx(0.0, abs=1e-6)
    assert replay.links.up[Tier.DRAM].bytes_total == 2 * BLOCK_BYTES


def test_a_hit_on_nvme_crosses_both_links() -> None:
    runs = [[0, 1], [2, 3], [4, 5], [0, 1]]
    sizes = {Tier.HBM: 2, Tier.DRAM: 2, Tier.NVME: 4}
    replay = replay_of(trace_of(runs), sizes, LruPolicy(), AT_ONCE)
    assert replay.run().tolist() == [0, 0, 0, 2]
    assert replay.hit_blocks[Tier.NVME] == 2
    size = 2 * BLOCK_BYTES
    up = DRAM_NVME_READ.latency_s + size / DRAM_NVME_READ.bytes_per_s
    assert replay.ttft_s[3] == pytest.approx(up + HBM_DRAM.latency_s + size / HBM_DRAM.bytes_per_s)
    assert replay.links.down[Tier.DRAM].bytes_total >= size


def test_a_chain_stays_pinned_until_its_reply_has_ended() -> None:
    runs = [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    ended = replay_of(trace_of(runs), {Tier.DRAM: 3}, LruPolicy(), AT_ONCE)
    assert ended.run().tolist() == [0, 0, 0]
    running = replay_of(trace_of(runs), {Tier.DRAM: 3}, LruPolicy(), ServingModel(tpot_s=100.0))
    assert running.run().tolist() == [0, 0, 3]


def test_sizes_in_bytes_become_whole_blocks_of_the_tiers_that_are_there() -> None:
    sizes = TierSizes(hbm_bytes=0, dram_bytes=10_000, nvme_bytes=4095, kv_bytes_per_token=2)
    assert sizes.blocks(block_tokens=512) == {Tier.DRAM: 9, Tier.NVME: 3}


def test_a_link_carries_one_transfer_after_the_other() -> None:
    link = Link("up", LinkRate(bytes_per_s=100.0, latency_s=0.5))
    assert link.move(100, now=10.0) == 11.5
    assert link.move(50, now=10.0) == 12.5
    assert link.move(0, now=10.0) == 10.0
    assert link.by_bins(20.0, 4) == [0, 0, 150, 0]
