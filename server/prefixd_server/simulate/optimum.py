"""The offline optimum: the most blocks that any cache of a size could have hit. It knows the future.

It is Belady's MIN with bypass on the flattened sequence of blocks, ties between
equally far uses broken deepest first. A request for a block implies its ancestors, so
an ancestor's next use is never later than its descendant's, and MIN never keeps
a block without its ancestors: the bound includes prefix closure. It is exact in
blocks; in tokens it is off by partial last blocks only.

Since what is kept for a future request is always a leading part of that
request's run, the whole state is one count per future request.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prefixd_server.simulate.traces import Trace

NEVER = np.iinfo(np.int64).max


def next_requests(trace: Trace) -> NDArray[np.int64]:
    """For each reference, the next request that asks for the same block, NEVER when there is none."""
    request = np.repeat(np.arange(trace.request_count, dtype=np.int64), np.diff(trace.starts))
    order = np.argsort(trace.ids, kind="stable")
    same = trace.ids[order[1:]] == trace.ids[order[:-1]]
    following = np.full(len(trace.ids), NEVER, dtype=np.int64)
    following[order[:-1][same]] = request[order[1:][same]]
    return following


def optimal_hits(trace: Trace, capacity_blocks: int) -> NDArray[np.int64]:
    """Blocks hit by each request under the optimum, shape (requests,)."""
    following = next_requests(trace)
    hits = np.zeros(trace.request_count, dtype=np.int64)
    kept: dict[int, int] = {}
    farthest: list[int] = []
    used = 0
    starts = trace.starts.tolist()
    for request in range(trace.request_count):
        hit = kept.pop(request, 0)
        hits[request] = hit
        used -= hit
        uses = following[starts[request] : starts[request + 1]]
        # Never decreasing with depth, so equal ones are neighbours.
        edges = np.flatnonzero(uses[1:] != uses[:-1]) + 1
        bounds = [0, *edges.tolist(), len(uses)]
        for first, last in pairwise(bounds):
            if first == last or uses[first] == NEVER:
                continue
            use = int(uses[first])
            if use not in kept:
                kept[use] = 0
                heapq.heappush(farthest, -use)
            kept[use] += last - first
            used += last - first
        while used > capacity_blocks:
            use = -farthest[0]
            dropped = min(kept.get(use, 0), used - capacity_blocks)
            used -= dropped
            if dropped == kept.get(use, 0):
                heapq.heappop(farthest)
                kept.pop(use, None)
            else:
                kept[use] -= dropped
    return hits
