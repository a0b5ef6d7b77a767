"""Replays of one tier: traces x policies x sizes x seeds.

A replay is deterministic in its seed. Results of several seeds are averaged.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.baselines.flat import replay_flat
from prefixd_server.simulate.optimum import optimal_hits
from prefixd_server.simulate.policies import FLAT, OPTIMUM, SEEDED, TREE
from prefixd_server.simulate.replay import Replay
from prefixd_server.simulate.traces import Trace, load_tokenizer, read_trace

PINNING = "own chain pinned at its arrival instant only"


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where a trace comes from, so that a process can read it for itself.

    name: what to call it, where not after its file.
    """

    path: Path
    tokenizer: Path | None = None
    block_tokens: int = 512
    name: str = ""

    def read(self) -> Trace:
        """Reads it, once per process."""
        return _read(self)


@lru_cache(maxsize=2)
def _read(source: TraceSource) -> Trace:
    tokenizer = None if source.tokenizer is None else load_tokenizer(source.tokenizer)
    trace = read_trace(source.path, tokenizer, source.block_tokens)
    return replace(trace, name=source.name or trace.name)


@dataclass(frozen=True, slots=True)
class Job:
    """One replay."""

    source: TraceSource
    policy: str
    fraction: float
    seed: int
    serving: ServingModel
    use_stops: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replay, or the mean of several seeds, gave. Ratios are 0 to 1; times in seconds."""

    trace: str
    policy: str
    fraction: float
    capacity_blocks: int
    prefix_hit_token_ratio: float
    block_hit_ratio: float
    second_half_prefix_hit_token_ratio: float
    hit_tokens: float
    input_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p999_s: float
    references_per_s: float
    seed_count: int = 1
    seed_spread: float = 0.0
    pinning: str = PINNING

    def as_json(self) -> dict[str, Any]:
        """As written to the JSON list."""
        return asdict(self)


def run_job(job: Job) -> Outcome:
    """Carries out one replay."""
    trace = job.source.read()
    capacity = capacity_of(trace, job.fraction)
    started = time.process_time()
    hits = _hits(trace, job, capacity)
    spent = max(time.process_time() - started, 1e-9)
    return judge(
        trace, hits, job.serving, policy=job.policy, fraction=job.fraction, capacity=capacity, spent_s=spent
    )


def capacity_of(trace: Trace, fraction: float) -> int:
    """Blocks of a tier that holds this share of the trace's footprint, at least one."""
    return max(1, round(fraction * trace.block_count))


def _hits(trace: Trace, job: Job, capacity: int) -> NDArray[np.int64]:
    if job.policy == OPTIMUM:
        return optimal_hits(trace, capacity)
    if job.policy in FLAT:
        return replay_flat(trace, FLAT[job.policy](capacity))
    policy = TREE[job.policy](trace, capacity)
    return Replay(trace, policy, capacity, job.seed, job.serving, job.use_stops).run()


def judge(
    trace: Trace,
    hits: NDArray[np.int64],
    serving: ServingModel,
    *,
    policy: str,
    fraction: float,
    capacity: int,
    spent_s: float,
) -> Outcome:
    """Ratios and times from the blocks that each request hit."""
    tokens = np.minimum(hits * trace.block_tokens, trace.input_tokens)
    half = trace.request_count // 2
    ttft = serving.ttft_base_s + (trace.input_tokens - tokens) / serving.prefill_tokens_per_s
    p50, p99, p999 = np.quantile(ttft, [0.5, 0.99, 0.999]).tolist()
    return Outcome(
        trace=trace.name,
        policy=policy,
        fraction=fraction,
        capacity_blocks=capacity,
        prefix_hit_token_ratio=float(tokens.sum() / max(1, trace.input_tokens.sum())),
        block_hit_ratio=float(hits.sum() / max(1, trace.reference_count)),
        second_half_prefix_hit_token_ratio=float(
            tokens[half:].sum() / max(1, trace.input_tokens[half:].sum())
        ),
        hit_tokens=float(tokens.sum()),
        input_tokens=int(trace.input_tokens.sum()),
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=p50,
        ttft_p99_s=p99,
        ttft_p999_s=p999,
        references_per_s=trace.reference_count / spent_s,
    )


def jobs_for(
    sources: list[TraceSource],
    policies: list[str],
    fractions: list[float],
    seeds: list[int],
    serving: ServingModel,
    use_stops: bool,
) -> list[Job]:
    """All replays, the long ones of a trace beside each other so that a process reads few traces."""
    return [
        Job(source, policy, fraction, seed, serving, use_stops)
        for source in sources
        for policy in policies
        for fraction in fractions
        for seed in (seeds if policy in SEEDED else seeds[:1])
    ]


def mean_over_seeds(outcomes: list[Outcome]) -> list[Outcome]:
    """One outcome for each trace, policy and size; the spread is the largest less the smallest ratio."""
    groups: dict[tuple[str, str, float], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.trace, outcome.policy, outcome.fraction), []).append(outcome)
    return [_mean(group) for group in groups.values()]


def _mean(group: list[Outcome]) -> Outcome:
    averaged: dict[str, Any] = {
        name: float(np.mean([getattr(outcome, name) for outcome in group]))
        for name, value in asdict(group[0]).items()
        if isinstance(value, float) and name != "fraction"
    }
    ratios = [outcome.prefix_hit_token_ratio for outcome in group]
    averaged |= {"seed_count": len(group), "seed_spread": max(ratios) - min(ratios)}
    return replace(group[0], **averaged)
