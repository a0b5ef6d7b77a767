"""What a trace itself says, whatever caches it: sharing, reuse distances, hot prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prefixd_server.simulate.traces import Trace

GAP_EDGES_S = (1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 14400)
HOT_PREFIX_COUNT = 12


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between edges; the first is below the first edge, the last above the last."""

    labels: tuple[str, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A shared beginning: its length in tokens, the requests that use it, and how many ways they go on."""

    tokens: int
    request_count: int
    continuation_count: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one trace. Ratios are 0 to 1."""

    trace: str
    block_tokens: int
    request_count: int
    duration_s: float
    mean_input_tokens: float
    footprint_tokens: int
    reference_count: int
    reused_block_ratio: float
    infinite_hit_token_ratio: float
    reuse_gap_p50_s: float
    reuse_gap_p99_s: float
    gaps: Histogram
    distances: Histogram
    sharing: Histogram
    hot: tuple[HotPrefix, ...]


def shape_of(trace: Trace) -> Shape:
    """Reads the whole trace once."""
    requests = np.repeat(np.arange(trace.request_count), np.diff(trace.starts))
    order = np.argsort(trace.ids, kind="stable")
    again = trace.ids[order[1:]] == trace.ids[order[:-1]]
    times = trace.arrival_s[requests]
    gaps = (times[order[1:]] - times[order[:-1]])[again]
    positions = np.arange(trace.reference_count)
    distances = (positions[order[1:]] - positions[order[:-1]])[again].astype(np.float64)
    uses = np.bincount(trace.ids, minlength=trace.block_count)
    first = np.zeros(trace.reference_count, dtype=np.bool_)
    first[order[np.concatenate([[True], ~again])]] = True
    p50, p99 = np.quantile(gaps, [0.5, 0.99]).tolist() if len(gaps) else (0.0, 0.0)
    return Shape(
        trace=trace.name,
        block_tokens=trace.block_tokens,
        request_count=trace.request_count,
        duration_s=float(trace.arrival_s[-1]),
        mean_input_tokens=float(trace.input_tokens.mean()),
        footprint_tokens=trace.block_count * trace.block_tokens,
        reference_count=trace.reference_count,
        reused_block_ratio=float((uses > 1).mean()),
        infinite_hit_token_ratio=_infinite(trace, first),
        reuse_gap_p50_s=p50,
        reuse_gap_p99_s=p99,
        gaps=_histogram(gaps, GAP_EDGES_S, "s"),
        distances=_histogram(100 * distances / trace.block_count, (0.1, 0.3, 1, 3, 10, 30, 100, 300), "%"),
        sharing=_histogram(uses.astype(np.float64), (2, 3, 5, 10, 30, 100, 1000), "uses"),
        hot=_hot(trace, uses, requests),
    )


def _infinite(trace: Trace, first: NDArray[np.bool_]) -> float:
    """Token ratio of a cache that never forgets."""
    news = np.add.reduceat(np.append(first, False).astype(np.int64), trace.starts[:-1])
    lengths = np.diff(trace.starts)
    hits = np.where(lengths > 0, lengths - news, 0)
    tokens = np.minimum(hits * trace.block_tokens, trace.input_tokens)
    return float(tokens.sum() / max(1, trace.input_tokens.sum()))


def _histogram(values: NDArray[np.float64], edges: tuple[float, ...], unit: str) -> Histogram:
    counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
    between = [f"{low:g}-{high:g}" for low, high in pairwise(edges)]
    labels = (f"< {edges[0]:g} {unit}", *between, f">= {edges[-1]:g} {unit}")
    return Histogram(labels, tuple(counts.astype(float).tolist()))


def _hot(trace: Trace, uses: NDArray[np.int64], requests: NDArray[np.int64]) -> tuple[HotPrefix, ...]:
    """Beginnings that end where requests part: the last block of a shared run, most used first."""
    depth = np.arange(trace.reference_count) - trace.starts[requests]
    inside = np.flatnonzero(requests[1:] == requests[:-1])
    parents, children = trace.ids[inside], trace.ids[inside + 1]
    pairs = np.unique(np.stack([parents, children]), axis=1)
    fanout = np.bincount(pairs[0], minlength=trace.block_count)
    depth_of = np.zeros(trace.block_count, dtype=np.int64)
    depth_of[trace.ids] = depth
    parting = np.flatnonzero(fanout >= 2)
    chosen = parting[np.argsort(-uses[parting], kind="stable")][:HOT_PREFIX_COUNT]
    return tuple(
        HotPrefix(
            tokens=int((depth_of[block] + 1) * trace.block_tokens),
            request_count=int(uses[block]),
            continuation_count=int(fanout[block]),
        )
        for block in chosen.tolist()
    )
