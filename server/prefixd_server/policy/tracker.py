"""A watched sample of blocks: when each was last used, and in which class it waits since.

Blocks are chosen by their prefix hash, whether or not a copy is kept anywhere,
so what is learned does not depend on what the cache keeps: blocks that were
evicted are watched like the others. The table is of a fixed size; the sampling
rate gives way when the workload is larger than it.

A hash that collides overwrites: the older block leaves the sample, both in its
reuses and in its exposure, which biases nothing. Where in the table a block lies is
chance already, so any stretch of it is a random sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Hashes
from prefixd_server.policy.hazard import HazardTable
from prefixd_server.policy.signals import CLASS_COUNT, REPLY_COUNT, age_buckets

SLOT_COUNT = 1 << 16
"""Places for watched blocks, 18 bytes each."""
RATE_START = 0.25
RATE_MIN = 2.0**-20
FILL_MAX = 0.7
"""At this fill what is older than the horizon is forgotten, and the rate halved when that is too little."""
HORIZON_MIN_S = 3600.0
EXPOSURE_SAMPLE_COUNT = 256
"""Places looked at to measure exposure, each time: the next ones of the table. Divides SLOT_COUNT."""
EXPOSURE_PERIOD_S = 1.0
WAITING_REUSES_MAX = 4096
"""Reuses are handed to the hazard table together, when it is asked or at so many."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_CLASS_WHILE_RUNNING = np.arange(CLASS_COUNT, dtype=np.uint16) // REPLY_COUNT * REPLY_COUNT


@dataclass(slots=True)
class Watched:
    """The watched blocks of one request, so that its end can be booked on them.

    index: positions in the run; slots, keys: their places and keys in the table.
    """

    index: NDArray[np.intp]
    slots: NDArray[np.intp]
    keys: NDArray[np.uint64]
    known: NDArray[np.bool_]
    used_at: float


class ReuseTracker:
    """See the module. Feeds the hazard table."""

    def __init__(self, hazards: HazardTable) -> None:
        self._hazards = hazards
        self._key: NDArray[np.uint64] = np.zeros(SLOT_COUNT, dtype=np.uint64)
        self._last_use: NDArray[np.float64] = np.zeros(SLOT_COUNT)
        self._class: NDArray[np.uint16] = np.zeros(SLOT_COUNT, dtype=np.uint16)
        self._count = 0
        self.horizon_s = HORIZON_MIN_S
        """Blocks that were not used for longer are forgotten when the table is full."""
        self._exposed_at: float | None = None
        self._exposed_slot = 0
        """Where the next stretch of the table begins."""
        self._reused: list[tuple[NDArray[np.uint16], NDArray[np.float64]]] = []
        """Classes and ages of reuses that the hazard table has not been told yet."""
        self._reused_count = 0
        self._set_rate(RATE_START)

    def _set_rate(self, rate: float) -> None:
        self.rate = rate
        self._threshold = np.uint64(int(rate * 2.0**63) * 2)

    def find(self, hashes: Hashes, now: float) -> Watched:
        """The watched blocks of a run, and which of them were used before.

        Args:
            hashes: from the run's first block on; the first word is looked at.
        """
        mixed = hashes[:, 0] * _ODD
        index = (mixed < self._threshold).nonzero()[0]
        keys = mixed.take(index)
        slots = keys.astype(np.uint16).astype(np.intp)
        return Watched(index, slots, keys, self._key.take(slots) == keys, now)

    def last_use_of_deepest(self, watched: Watched) -> tuple[int, float] | None:
        """Position in the run and last use of the deepest block that was used before."""
        known = watched.known.nonzero()[0]
        if len(known) == 0:
            return None
        deepest = int(known[-1])
        return int(watched.index[deepest]), float(self._last_use[watched.slots[deepest]])

    def known_classes(self, watched: Watched) -> tuple[NDArray[np.intp], NDArray[np.intp], float]:
        """Of the blocks that were used before: positions in the run, classes, and their latest use."""
        known = watched.known.nonzero()[0]
        slots = watched.slots[known]
        latest = float(self._last_use.take(slots).max()) if len(slots) else 0.0
        return watched.index[known], self._class.take(slots).astype(np.intp), latest

    def used(self, watched: Watched, class_new: int, class_again: int) -> None:
        """Books a use of the run: reuses of the known blocks, then all of them wait in a new class.

        Args:
            class_new, class_again: for blocks used for the first time, and used again.
        """
        known, slots = watched.known, watched.slots
        if len(slots) == 0:
            return
        again = slots[known]
        self._count += len(slots) - len(again)
        if len(again):
            self._reused.append((self._class.take(again), watched.used_at - self._last_use.take(again)))
            self._reused_count += len(again)
        self._key[slots] = watched.keys
        self._last_use[slots] = watched.used_at
        self._class[slots] = class_new
        if len(again):
            self._class[again] = class_again
        if self._reused_count > WAITING_REUSES_MAX:
            self.report()
        if self._count > FILL_MAX * SLOT_COUNT:
            self._make_room()

    def report(self) -> None:
        """Hands the reuses that were noted since to the hazard table."""
        if self._reused:
            classes, ages = zip(*self._reused, strict=True)
            self._hazards.observe_reuses(np.concatenate(classes), age_buckets(np.concatenate(ages)))
            self._reused.clear()
            self._reused_count = 0

    def finished(self, watched: Watched, reply: int) -> None:
        """The reply that followed this use has ended: its blocks change class, unless used again since."""
        slots = watched.slots
        if len(slots) == 0:
            return
        # A place that another block took since has another time, or is as recent: no harm then.
        slots = slots[self._last_use.take(slots) == watched.used_at]
        self._class[slots] = _CLASS_WHILE_RUNNING.take(self._class.take(slots)) + reply

    def expose(self, now: float) -> None:
        """Measures exposure on a sample of the table, for the time since the last measurement."""
        if self._exposed_at is None:
            self._exposed_at = now
        elapsed = now - self._exposed_at
        if elapsed < EXPOSURE_PERIOD_S:
            return
        self._exposed_at = now
        part = slice(self._exposed_slot, self._exposed_slot + EXPOSURE_SAMPLE_COUNT)
        self._exposed_slot = part.stop % SLOT_COUNT
        watched = self._key[part].nonzero()[0]
        if len(watched) == 0:
            return
        ages = now - self._last_use[part].take(watched)
        waited = np.minimum(ages, elapsed)
        buckets = age_buckets(ages - waited / 2)
        seconds = waited * (SLOT_COUNT / EXPOSURE_SAMPLE_COUNT)
        self._hazards.observe_exposure(self._class[part].take(watched), buckets, seconds)

    def _make_room(self) -> None:
        """Forgets what is older than the horizon, or watches fewer blocks where that does not help."""
        live = np.flatnonzero(self._key)
        old = live[self._last_use.take(live) < self._last_use.max() - self.horizon_s]
        self._key[old] = 0
        self._count = len(live) - len(old)
        if self._count <= FILL_MAX * FILL_MAX * SLOT_COUNT or self.rate <= RATE_MIN:
            return
        self._set_rate(self.rate / 2)
        self.report()
        self._hazards.decay(0.5)
        self._key[live[self._key.take(live) >= self._threshold]] = 0
        self._count = int(np.count_nonzero(self._key))

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._key.nbytes + self._last_use.nbytes + self._class.nbytes
