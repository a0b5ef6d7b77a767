"""Traces made by hand or at random, for the simulator's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prefixd_server.base.types import StopReason
from prefixd_server.simulate.traces import Trace

TRACES = Path(__file__).parent.parent / "data" / "traces"
BLOCK_TOKENS = 512


def trace_of(
    runs: list[list[int]],
    arrivals_s: list[float] | None = None,
    output_tokens: list[int] | None = None,
    stops: list[StopReason] | None = None,
) -> Trace:
    """A trace of full blocks; ids must be dense, each with one parent."""
    count = len(runs)
    lengths = np.array([len(run) for run in runs], dtype=np.int64)
    return Trace(
        name="made",
        block_tokens=BLOCK_TOKENS,
        arrival_s=np.array(arrivals_s if arrivals_s is not None else range(count), dtype=np.float64),
        input_tokens=lengths * BLOCK_TOKENS,
        output_tokens=np.array(output_tokens or [100] * count, dtype=np.int64),
        stops=tuple(stops or [StopReason.UNKNOWN] * count),
        ids=np.array([block for run in runs for block in run], dtype=np.int32),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        block_count=1 + max((block for run in runs for block in run), default=-1),
    )


def conversations(seed: int, request_count: int, turn_blocks_max: int = 4) -> Trace:
    """Conversations that share a first block, grow by turns and part at times."""
    rng = np.random.default_rng(seed)
    runs: list[list[int]] = []
    live: list[list[int]] = [[0]]
    following = 1
    for _ in range(request_count):
        start = live[int(rng.integers(len(live)))] if rng.random() < 0.7 else [0]
        kept = start[: int(rng.integers(1, len(start) + 1))] if rng.random() < 0.1 else start
        grown = [*kept, *range(following, following + int(rng.integers(1, turn_blocks_max + 1)))]
        following = grown[-1] + 1
        runs.append(grown)
        live = [*live[-11:], grown]
    arrivals = np.cumsum(rng.exponential(2.0, request_count)).tolist()
    outputs = rng.integers(1, 1500, request_count).tolist()
    kinds = list(StopReason)
    stops = [kinds[int(kind)] for kind in rng.integers(0, len(kinds), request_count)]
    return trace_of(runs, arrivals, outputs, stops)
