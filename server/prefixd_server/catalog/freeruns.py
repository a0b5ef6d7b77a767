"""The free slots of one pool, kept as maximal runs of consecutive slots.

Best fit over whole runs: a request gets the smallest run that holds all of it,
else the largest run and so on, so a run of blocks lies in few extents and large
runs are not nibbled at. Cost is per run of slots, never per slot. Runs do not
cross segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from prefixd_server.base.types import Slots

RUN_BYTES = 220
"""Memory of one free run, measured with tracemalloc: two dict entries, its place in a bin, its numbers."""


class FreeRuns:
    """Runs as half-open [start, end), coalesced.

    Args:
        stride: slot ids per segment; a run never crosses a multiple of it.
    """

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}
        """Starts of the runs of each length, oldest first."""
        self._lengths: list[int] = []
        """Lengths that occur, ascending."""
        self.slot_count = 0

    @property
    def run_count(self) -> int:
        """Maximal runs."""
        return len(self._end_of)

    @property
    def largest(self) -> int:
        """Slots of the longest run, 0 when there is none."""
        return self._lengths[-1] if self._lengths else 0

    def runs(self) -> list[tuple[int, int]]:
        """Every run as (start, end), in order of start."""
        return sorted(self._end_of.items())

    def end_of(self, start: int) -> int | None:
        """Where the run that begins at `start` ends; None when none does."""
        return self._end_of.get(start)

    def start_of(self, length: int) -> int | None:
        """Where a run of just this length begins; None when there is none."""
        return next(iter(self._bins.get(length, ())), None)

    def add(self, start: int, end: int) -> None:
        """Slots [start, end) of one segment became free; merges with its neighbours."""
        assert start < end, f"empty run [{start}, {end})"
        assert start not in self._end_of, f"slot {start} is free already"
        self.slot_count += end - start
        before = self._start_of.get(start) if start % self._stride else None
        if before is not None:
            self._unlink(before, start)
            start = before
        after = self._end_of.get(end) if end % self._stride else None
        if after is not None:
            self._unlink(end, after)
            end = after
        self._link(start, end)

    def take(self, count: int, after: int | None) -> list[tuple[int, int]]:
        """Removes up to `count` slots, in as few runs as best fit finds, and returns them as [start, end).

        Args:
            after: a slot that the first run should follow directly, if it can.
        """
        taken: list[tuple[int, int]] = []
        start = None if after is None or (after + 1) % self._stride == 0 else after + 1
        if start is not None and count > 0 and start in self._end_of:
            count -= self._cut(start, count, taken)
        while count > 0 and self._lengths:
            place = bisect_left(self._lengths, count)
            length = self._lengths[min(place, len(self._lengths) - 1)]
            count -= self._cut(next(iter(self._bins[length])), count, taken)
        return taken

    def take_segment(self, first: int) -> list[tuple[int, int]]:
        """Removes and returns every run of the segment whose first slot is `first`."""
        last = first + self._stride
        taken = [(start, end) for start, end in self._end_of.items() if first <= start < last]
        for start, end in taken:
            self._unlink(start, end)
            self.slot_count -= end - start
        return taken

    def _cut(self, start: int, count: int, taken: list[tuple[int, int]]) -> int:
        """Takes up to `count` slots from the front of the run at `start`; how many."""
        end = self._end_of[start]
        stop = min(start + count, end)
        self._unlink(start, end)
        if stop < end:
            self._link(stop, end)
        self.slot_count -= stop - start
        taken.append((start, stop))
        return stop - start

    def _link(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        length = end - start
        found = self._bins.get(length)
        if found is None:
            self._bins[length] = {start: None}
            insort(self._lengths, length)
        else:
            found[start] = None

    def _unlink(self, start: int, end: int) -> None:
        del self._end_of[start]
        del self._start_of[end]
        length = end - start
        found = self._bins[length]
        del found[start]
        if not found:
            del self._bins[length]
            del self._lengths[bisect_left(self._lengths, length)]


def slots_of(runs: list[tuple[int, int]]) -> Slots:
    """The slots of half-open runs, in the order of the runs."""
    if len(runs) == 1:
        return np.arange(*runs[0], dtype=np.uint32)
    if not runs:
        return np.zeros(0, dtype=np.uint32)
    return np.concatenate([np.arange(start, end, dtype=np.uint32) for start, end in runs])


def run_edges(slots: Slots, stride: int) -> list[int]:
    """Where maximal runs begin in `slots`, and its length at the end: run i is slots[edges[i]:edges[i + 1]].

    A run is consecutive ascending slots of one segment.
    """
    if len(slots) == 0:
        return [0]
    steps = np.flatnonzero((slots[1:] != slots[:-1] + np.uint32(1)) | (slots[1:] % np.uint32(stride) == 0))
    return [0, *(steps + 1).tolist(), len(slots)]
