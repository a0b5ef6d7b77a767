"""Replays of a node with several tiers: traces x policies x sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prefixd_server.base.types import Tier
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.policies import TREE
from prefixd_server.simulate.study import TraceSource
from prefixd_server.simulate.tiers import TierReplay, TierSizes

TIME_BIN_COUNT = 60
PINNING = "own chain pinned until the request ends"


@dataclass(frozen=True, slots=True)
class TierJob:
    """One replay."""

    source: TraceSource
    policy: str
    sizes: TierSizes
    seed: int
    serving: ServingModel
    use_stops: bool
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """What it gave. Ratios are of input tokens, times in seconds; link bytes are over equal parts of time."""

    trace: str
    policy: str
    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int
    prefix_hit_token_ratio: float
    hit_token_ratio_by_tier: dict[str, float]
    hit_blocks_by_tier: dict[str, int]
    block_hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p999_s: float
    tokens_saved: float
    link_bytes: dict[str, int]
    link_bytes_over_time: dict[str, list[int]]
    ssd_written_bytes: int
    duration_s: float
    links_busy_s: float
    queue_s: float
    prefetched_bytes: int
    prefetched_in_vain_bytes: int
    pinning: str = PINNING

    def as_json(self) -> dict[str, Any]:
        """As written to the JSON list."""
        return asdict(self)


def run_tier_job(job: TierJob) -> TierOutcome:
    """Carries out one replay."""
    trace = job.source.read()
    capacities = job.sizes.blocks(trace.block_tokens)
    policy = TREE[job.policy](trace, sum(capacities.values()))
    block_bytes = job.sizes.kv_bytes_per_token * trace.block_tokens
    replay = TierReplay(
        trace, policy, capacities, block_bytes, job.seed, job.serving, job.use_stops, job.queue_s
    )
    hits = replay.run()
    total = max(1, int(trace.input_tokens.sum()))
    p50, p99, p999 = np.quantile(replay.ttft_s, [0.5, 0.99, 0.999]).tolist()
    duration = float(trace.arrival_s[-1])
    links = replay.links.all()
    busy = max(duration, *(link.free_at for link in links))
    return TierOutcome(
        trace=trace.name,
        policy=job.policy,
        hbm_bytes=job.sizes.hbm_bytes,
        dram_bytes=job.sizes.dram_bytes,
        nvme_bytes=job.sizes.nvme_bytes,
        prefix_hit_token_ratio=float(sum(replay.hit_tokens.values()) / total),
        hit_token_ratio_by_tier={
            tier.name: float(tokens / total) for tier, tokens in replay.hit_tokens.items()
        },
        hit_blocks_by_tier={tier.name: blocks for tier, blocks in replay.hit_blocks.items()},
        block_hit_ratio=float(hits.sum() / max(1, trace.reference_count)),
        ttft_mean_s=float(replay.ttft_s.mean()),
        ttft_p50_s=p50,
        ttft_p99_s=p99,
        ttft_p999_s=p999,
        tokens_saved=float(sum(replay.hit_tokens.values())),
        link_bytes={link.name: link.bytes_total for link in links},
        link_bytes_over_time={link.name: link.by_bins(busy, TIME_BIN_COUNT) for link in links},
        ssd_written_bytes=replay.links.down[Tier.DRAM].bytes_total,
        duration_s=duration,
        links_busy_s=busy,
        queue_s=job.queue_s,
        prefetched_bytes=block_bytes * (replay.queue.brought_count if replay.queue else 0),
        prefetched_in_vain_bytes=block_bytes * (replay.queue.useless_count if replay.queue else 0),
    )
