"""Replays of several tiers: the books balance, the daemon's code decides what lies where, links carry it."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.config import MigrationConfig
from prefixd_server.base.types import NO_SLOT, Rows, Tier
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


@pytest.mark.parametrize("policy", [ImportancePolicy, LruPolicy])
def test_nvme_below_dram_is_nearly_as_good_as_more_dram(policy: type[Policy]) -> None:
    trace = conversations(6, 1500)
    alone, both, more = (
        replay_of(trace, sizes, policy(), AT_ONCE).run().sum()
        for sizes in ({Tier.DRAM: 40}, {Tier.DRAM: 40, Tier.NVME: 120}, {Tier.DRAM: 160})
    )
    assert both > 1.1 * alone
    assert both > 0.98 * more


def chains(count: int, length: int) -> list[list[int]]:
    """Runs that share nothing."""
    return [list(range(first, first + length)) for first in range(0, count * length, length)]


def test_what_hits_below_is_waited_for_and_is_in_dram_afterwards() -> None:
    runs = [*chains(14, 4), [0, 1, 2, 3], [0, 1, 2, 3]]
    replay = replay_of(trace_of(runs), {Tier.DRAM: 40, Tier.NVME: 80}, LruPolicy(), AT_ONCE)
    assert replay.run().tolist() == [*[0] * 14, 4, 4]
    assert replay.hit_blocks == {Tier.DRAM: 4, Tier.NVME: 4}
    size = 4 * BLOCK_BYTES
    to_gpu = HBM_DRAM.latency_s + size / HBM_DRAM.bytes_per_s
    read = DRAM_NVME_READ.latency_s + size / DRAM_NVME_READ.bytes_per_s
    assert replay.ttft_s[14] == pytest.approx(read + to_gpu)
    assert replay.ttft_s[15] == pytest.approx(to_gpu)
    assert replay.links.up[Tier.NVME].bytes_total == size
    assert replay.links.down[Tier.DRAM].bytes_total == BLOCK_BYTES * replay.used[Tier.NVME]


def test_only_what_requests_share_goes_into_hbm() -> None:
    runs = [[0, 1], [2, 3], [0, 1], [0, 1]]
    slow = ServingModel(ttft_base_s=0.0, prefill_tokens_per_s=1e12, tpot_s=1.0)
    replay = replay_of(trace_of(runs), {Tier.HBM: 4, Tier.DRAM: 20}, LruPolicy(), slow)
    assert replay.run().tolist() == [0, 0, 2, 2]
    assert replay.hit_blocks == {Tier.HBM: 2, Tier.DRAM: 2}
    assert replay.used == {Tier.HBM: 2, Tier.DRAM: 4}
    assert replay.ttft_s[3] == pytest.approx(0.0, abs=1e-6)
    # Read by the third request, and copied beside that.
    assert replay.links.up[Tier.DRAM].bytes_total == 4 * BLOCK_BYTES


def test_nothing_goes_into_hbm_at_the_cost_of_what_it_alone_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = replay_of(
        conversations(9, 600), {Tier.HBM: 6, Tier.DRAM: 60}, ImportancePolicy(), ServingModel()
    )
    forgotten: list[int] = []
    dropped = replay.drop

    def drop(tier: Tier, rows: Rows) -> None:
        before = replay.columns.count
        dropped(tier, rows)
        if tier is Tier.HBM:
            forgotten.append(before - replay.columns.count)

    monkeypatch.setattr(replay, "drop", drop)
    replay.run()
    assert replay.hit_blocks[Tier.HBM] > 0
    assert len(forgotten) > 0
    assert sum(forgotten) == 0


def test_what_a_queued_request_needs_is_in_dram_when_it_begins() -> None:
    runs = [*chains(14, 4), [0, 1, 2, 3, 56]]
    sizes = {Tier.DRAM: 40, Tier.NVME: 80}
    replay = TierReplay(trace_of(runs), LruPolicy(), sizes, BLOCK_BYTES, 1, AT_ONCE, queue_s=2.5)
    assert replay.run().tolist() == [*[0] * 14, 4]
    assert replay.hit_blocks == {Tier.DRAM: 4, Tier.NVME: 0}
    assert replay.queue is not None
    assert (replay.queue.brought_count, replay.queue.useless_count) == (4, 0)
    assert replay.held_count == {Tier.DRAM: 5, Tier.NVME: 0}, "of the request that runs"


def test_what_is_still_on_its_way_is_waited_for_and_not_read_twice() -> None:
    runs = [*chains(14, 4), [0, 1, 2, 3]]
    sizes = {Tier.DRAM: 40, Tier.NVME: 80}
    replay = TierReplay(trace_of(runs), LruPolicy(), sizes, BLOCK_BYTES, 1, AT_ONCE, queue_s=1e-4)
    replay.run()
    assert replay.hit_blocks == {Tier.DRAM: 0, Tier.NVME: 4}
    size = 4 * BLOCK_BYTES
    assert replay.links.up[Tier.NVME].bytes_total == size
    read = DRAM_NVME_READ.latency_s + size / DRAM_NVME_READ.bytes_per_s
    to_gpu = HBM_DRAM.latency_s + size / HBM_DRAM.bytes_per_s
    assert replay.ttft_s[14] == pytest.approx(read - 1e-4 + to_gpu)


def test_what_is_held_for_too_long_is_let_go_and_counted() -> None:
    runs = [*chains(14, 4), [0, 1, 2, 3], [57]]
    sizes = {Tier.DRAM: 40, Tier.NVME: 80}
    migration = MigrationConfig(prefetch_hold_max_s=0.5)
    replay = TierReplay(
        trace_of(runs), LruPolicy(), sizes, BLOCK_BYTES, 1, AT_ONCE, queue_s=3.0, migration=migration
    )
    assert replay.run().tolist() == [*[0] * 14, 4, 0]
    assert replay.queue is not None
    assert (replay.queue.brought_count, replay.queue.useless_count) == (4, 4)


def test_nothing_is_copied_ahead_while_hardly_any_dram_can_be_given_up() -> None:
    trace = trace_of(chains(25, 4))
    slow = ServingModel(tpot_s=1000.0)
    held = replay_of(trace, {Tier.DRAM: 40, Tier.NVME: 80}, LruPolicy(), slow)
    held.run()
    assert held.used == {Tier.DRAM: 40, Tier.NVME: 0}
    free = replay_of(trace, {Tier.DRAM: 40, Tier.NVME: 80}, LruPolicy(), AT_ONCE)
    free.run()
    assert free.used[Tier.NVME] > 60


def test_new_blocks_are_declined_while_running_requests_hold_dram() -> None:
    runs = [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    slow = ServingModel(tpot_s=100.0)
    replay = replay_of(trace_of(runs), {Tier.HBM: 4, Tier.DRAM: 6}, LruPolicy(), slow)
    assert replay.run().tolist() == [0, 0, 2]


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


def test_what_waits_for_its_bytes_keeps_nothing_else_from_its_link() -> None:
    link = Link("up", LinkRate(bytes_per_s=100.0, latency_s=0.0))
    assert link.move(100, now=0.0, ready_at=10.0) == 11.0
    assert link.move(200, now=1.0) == 3.0
    assert link.move(800, now=1.0) == 19.0, "too much for what is left before"
    assert link.move(100, now=2.0, ready_at=4.0) == 5.0
    assert link.move(100, now=2.0) == 4.0
    assert link.move(500, now=2.0) == 10.0
    assert link.move(100, now=2.0) == 20.0
    assert link.bytes_total == 1900
    assert link.by_bins(20.0, 4) == [400, 500, 500, 500]


def test_a_hit_in_dram_does_not_wait_for_what_another_reads_from_nvme() -> None:
    runs = [*chains(14, 4), [0, 1, 2, 3], [52, 53, 54, 55]]
    arrivals = [*map(float, range(14)), 14.0, 14.0]
    replay = replay_of(trace_of(runs, arrivals), {Tier.DRAM: 40, Tier.NVME: 80}, LruPolicy(), AT_ONCE)
    replay.run()
    assert replay.hit_blocks == {Tier.DRAM: 4, Tier.NVME: 4}
    to_gpu = HBM_DRAM.latency_s + 4 * BLOCK_BYTES / HBM_DRAM.bytes_per_s
    assert replay.ttft_s[14] > 2 * to_gpu
    assert replay.ttft_s[15] == pytest.approx(to_gpu)


def test_a_link_carries_in_no_time_more_than_its_rate() -> None:
    link = Link("up", LinkRate(bytes_per_s=100.0, latency_s=0.0))
    link.move(1000, now=1.0)
    assert link.by_bins(12.0, 4) == [200, 300, 300, 200]
    assert max(link.by_bins(12.0, 60)) <= 100 * 12 / 60
