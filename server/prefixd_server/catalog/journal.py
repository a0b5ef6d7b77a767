"""The story of blocks: a bounded ring of transitions, kept for people.

Not a log and not durable. One entry a block and transition, in arrays, so that
telling costs a few numpy calls per run.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Hashes

JOURNAL_ENTRY_COUNT = 1 << 16


class Verb(IntEnum):
    """What happened, as told in a story."""

    RESERVED = 1
    COMMITTED = 2
    VISIBLE = 3
    WRITER_FAILED = 4
    USED = 5
    COPY_STARTED = 6
    COPY_PUBLISHED = 7
    COPY_DROPPED = 8
    FOUND_BAD = 9
    FORGOTTEN = 10
    PINNED = 11
    UNPINNED = 12
    MOVED = 13
    RECOVERED = 14


class Journal:
    """A ring of (time, verb, space, first word of the hash)."""

    def __init__(self, entry_count: int = JOURNAL_ENTRY_COUNT) -> None:
        self._entry_count = entry_count
        self._time = np.zeros(entry_count, dtype=np.float64)
        self._verb = np.zeros(entry_count, dtype=np.uint8)
        self._space = np.zeros(entry_count, dtype=np.uint32)
        self._word = np.zeros(entry_count, dtype=np.uint64)
        self._next = 0

    def tell(
        self, now: float, verb: Verb, space: int | NDArray[np.uint32], words: NDArray[np.uint64]
    ) -> None:
        """Adds one entry per word; a run longer than the ring keeps its end."""
        count = min(len(words), self._entry_count)
        if count == 0:
            return
        start = self._next
        if start + count <= self._entry_count:
            where: slice | NDArray[np.int64] = slice(start, start + count)
        else:
            where = np.arange(start, start + count) % self._entry_count
        self._time[where] = now
        self._verb[where] = verb
        self._space[where] = space if isinstance(space, int) else space[-count:]
        self._word[where] = words[-count:]
        self._next = (start + count) % self._entry_count

    def story(self, space: int, key: Hashes, now: float, line_count_max: int = 64) -> tuple[str, ...]:
        """What is still remembered of one block, oldest first; ages in seconds before `now`."""
        found = np.flatnonzero(
            (self._space == space) & (self._word == key.reshape(-1)[0]) & (self._verb != 0)
        )
        ordered = found[np.argsort((found - self._next) % self._entry_count)][-line_count_max:]
        return tuple(
            f"{now - self._time[i]:.3f} s ago: {Verb(int(self._verb[i])).name.lower().replace('_', ' ')}"
            for i in ordered
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return self._time.nbytes + self._verb.nbytes + self._space.nbytes + self._word.nbytes
