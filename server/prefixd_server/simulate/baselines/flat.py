"""Established policies over single blocks, which know nothing of prefixes: s3fifo and wtinylfu.

They are judged by prefix hits like all others; what they keep without its
ancestors is of no use. One access per block and request, first block first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefixd_server.simulate.traces import Trace

SMALL_SHARE = 0.1
"""S3-FIFO: part of the cache that new blocks go through."""
FREQUENCY_MAX = 3
WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
AGING_FACTOR = 10
"""W-TinyLFU: frequencies are halved after so many accesses per block of capacity."""


class FlatCache(Protocol):
    """A cache of block ids."""

    def __contains__(self, block: int) -> bool: ...

    def access(self, block: int) -> None:
        """The block is used: found, or put in."""
        ...


class S3Fifo:
    """Three queues: small, main, and a ghost of what left small unused (SOSP'23)."""

    def __init__(self, capacity_blocks: int) -> None:
        self._small_max = max(1, int(SMALL_SHARE * capacity_blocks))
        self._capacity = capacity_blocks
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._frequency: dict[int, int] = {}
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._frequency

    def access(self, block: int) -> None:
        """See FlatCache."""
        if block in self._frequency:
            self._frequency[block] = min(self._frequency[block] + 1, FREQUENCY_MAX)
            return
        while len(self._frequency) >= self._capacity:
            self._evict()
        if block in self._ghost:
            del self._ghost[block]
            self._main.append(block)
        else:
            self._small.append(block)
        self._frequency[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_max or not self._main:
            block = self._small.popleft()
            if self._frequency[block] > 1:
                self._frequency[block] = 0
                self._main.append(block)
                return
            del self._frequency[block]
            self._ghost[block] = None
            if len(self._ghost) > self._capacity:
                self._ghost.popitem(last=False)
            return
        block = self._main.popleft()
        if self._frequency[block]:
            self._frequency[block] -= 1
            self._main.append(block)
        else:
            del self._frequency[block]


class WTinyLfu:
    """A window, then a segmented LRU that only the more frequent enter; exact frequencies, which age."""

    def __init__(self, capacity_blocks: int) -> None:
        self._window_max = max(1, int(WINDOW_SHARE * capacity_blocks))
        self._main_max = max(1, capacity_blocks - self._window_max)
        self._protected_max = int(PROTECTED_SHARE * self._main_max)
        self._aging_period = AGING_FACTOR * capacity_blocks
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._frequency: dict[int, int] = {}
        self._accesses = 0

    def __contains__(self, block: int) -> bool:
        return block in self._window or block in self._protected or block in self._probation

    def access(self, block: int) -> None:
        """See FlatCache."""
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            del self._probation[block]
            self._protected[block] = None
            if len(self._protected) > self._protected_max:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self._window[block] = None
            if len(self._window) > self._window_max:
                self._leave_window(self._window.popitem(last=False)[0])

    def _leave_window(self, block: int) -> None:
        if len(self._probation) + len(self._protected) >= self._main_max:
            rivals = self._probation or self._protected
            rival = next(iter(rivals))
            if self._frequency.get(block, 0) <= self._frequency.get(rival, 0):
                return
            del rivals[rival]
        self._probation[block] = None

    def _count(self, block: int) -> None:
        self._frequency[block] = min(self._frequency.get(block, 0) + 1, 15)
        self._accesses += 1
        if self._accesses >= self._aging_period:
            self._accesses = 0
            self._frequency = {key: value // 2 for key, value in self._frequency.items() if value > 1}


def replay_flat(
    trace: Trace, cache: FlatCache, progress: Callable[[int], None] | None = None
) -> NDArray[np.int64]:
    """Blocks of the leading run that each request hits, shape (requests,)."""
    hits = np.zeros(trace.request_count, dtype=np.int64)
    for request in range(trace.request_count):
        run = trace.run(request).tolist()
        hit = 0
        while hit < len(run) and run[hit] in cache:
            hit += 1
        hits[request] = hit
        for block in run:
            cache.access(block)
        if progress is not None:
            progress(request)
    return hits
