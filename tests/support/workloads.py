"""Made workloads of a known kind, for policies that must not be tuned to a trace.

Each request asks for one document: a run of blocks of its own below a shared
first block. What differs is which document is asked for when.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from prefixd_server.simulate.traces import Trace

from tests.support.requests import trace_of

RUN_BLOCKS = 8
PERIOD_S = 2.0


def documents(order: NDArray[np.intp], seed: int) -> Trace:
    """Requests for documents, in this order, some seconds apart."""
    _, dense = np.unique(order, return_inverse=True)
    runs = [[0, *range(1 + document * RUN_BLOCKS, 1 + (document + 1) * RUN_BLOCKS)] for document in dense]
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(PERIOD_S, len(order)))
    return trace_of(runs, arrivals.tolist(), rng.integers(1, 1500, len(order)).tolist())


def loop(document_count: int, request_count: int) -> NDArray[np.intp]:
    """The same documents round and round: what LRU evicts is always what is asked for next."""
    return np.arange(request_count) % document_count


def zipf(document_count: int, request_count: int, seed: int, exponent: float = 0.9) -> NDArray[np.intp]:
    """A few documents are asked for often, most rarely, each time independently."""
    weights = np.arange(1, document_count + 1) ** -exponent
    rng = np.random.default_rng(seed)
    return rng.choice(document_count, request_count, p=weights / weights.sum())


def with_scans(order: NDArray[np.intp], every: int, length: int) -> NDArray[np.intp]:
    """Between the requests, now and then, documents that nobody asks for again."""
    first = int(order.max()) + 1
    parts = []
    for start in range(0, len(order), every):
        parts += [order[start : start + every], np.arange(first, first + length)]
        first += length
    return np.concatenate(parts)


def shifting(document_count: int, request_count: int, phase_count: int, seed: int) -> NDArray[np.intp]:
    """Zipf whose popular documents are others in each phase."""
    order = zipf(document_count, request_count, seed)
    rng = np.random.default_rng(seed + 1)
    phases = [rng.permutation(document_count) for _ in range(phase_count)]
    phase = np.arange(request_count) * phase_count // request_count
    return np.array([phases[p][document] for p, document in zip(phase, order, strict=True)])


def recent(request_count: int, depth: int, seed: int) -> NDArray[np.intp]:
    """LRU's own workload: either a new document, or one of the last few that were asked for."""
    rng = np.random.default_rng(seed)
    stack: list[int] = []
    order = []
    for _ in range(request_count):
        place = int(rng.geometric(1.0 / depth))
        document = stack.pop(-place) if place <= len(stack) and rng.random() < 0.8 else len(order)
        stack.append(document)
        order.append(document)
    return np.array(order)
