"""The reuse index V: what keeping a block is worth, learned online per class and age.

For each class k and age bucket j the table counts reuses H and block-seconds of
exposure E. The hazard (reuses per block-second) is H/E shrunk to coarser
classes and at last to a prior that falls with age; with no data the order it
gives is that of LRU. The index is the best rate of reuse that staying on can
earn, over all times at which one could stop (POLICY.md D2, the Gittins form):

    V_k(j) = max over z of  (reuses in j..z) / (block-seconds spent in j..z)

Not here: which blocks are watched (tracker.py), what a class is (signals.py).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from prefixd_server.policy.signals import (
    AGE_BUCKET_COUNT,
    AGE_MIDDLES_S,
    AGE_WIDTHS_S,
    CLASS_COUNT,
    HINT_COUNT,
    HISTORY_COUNT,
    REPLY_COUNT,
    Signal,
    classes_without,
)

Table = NDArray[np.float64]

PRIOR_HAZARD = 0.3
"""The prior hazard at age a is PRIOR_HAZARD / (a + 5 s): falling, so that the order is LRU's."""
SHRINK_BLOCKS = 200.0
"""Weight of the coarser class, in blocks: reuses come in runs, so this is some ten independent reuses."""
SMOOTHING_PASSES = 2
"""Passes of (1/4, 1/2, 1/4) over neighbouring ages."""
REBUILD_SHARE = 0.05
"""The index is rebuilt when this part of the evidence is new."""
_KIND_OF_CLASS = (np.arange(CLASS_COUNT) // REPLY_COUNT % 2 * REPLY_COUNT) + np.where(
    np.arange(CLASS_COUNT) % REPLY_COUNT < HINT_COUNT, 0, HINT_COUNT + np.arange(CLASS_COUNT) % HINT_COUNT
)
"""Classes of one kind have the same coarser class: reused or not, and running or how the reply ended."""
_WINDOWS = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8), (16, 16), (32, 16), (32, 32))
"""Window lengths in buckets, each as the sum of two that come before: 1, then 2, 3, 4, 6, 8, ... 64."""


class HazardTable:
    """See the module. `index` is V, flat: class x AGE_BUCKET_COUNT + age bucket, per second.

    Args:
        ignored: signals that classes are not told apart by.
    """

    def __init__(self, ignored: Collection[Signal] = ()) -> None:
        self._stand_in = classes_without(ignored) if ignored else None
        self._reuses: Table = np.zeros((CLASS_COUNT, AGE_BUCKET_COUNT))
        self._exposure_s: Table = np.zeros((CLASS_COUNT, AGE_BUCKET_COUNT))
        self._flat_reuses = self._reuses.ravel()
        self._flat_exposure = self._exposure_s.ravel()
        self._seen = 0.0
        self._new = 0.0
        self.index: Table = np.zeros(CLASS_COUNT * AGE_BUCKET_COUNT)
        self.rebuild(1.0)

    def observe_reuses(self, classes: NDArray[np.integer], buckets: NDArray[np.intp]) -> None:
        """Counts one reuse of a block for each class and age bucket, which may repeat."""
        np.add.at(self._flat_reuses, self._places(classes, buckets), 1.0)
        self._new += len(classes)

    def observe_exposure(
        self, classes: NDArray[np.integer], buckets: NDArray[np.intp], seconds: Table
    ) -> None:
        """Adds the time that blocks of these classes and ages have waited, in seconds each."""
        np.add.at(self._flat_exposure, self._places(classes, buckets), seconds)

    def _places(self, classes: NDArray[np.integer], buckets: NDArray[np.intp]) -> NDArray[np.intp]:
        if self._stand_in is not None:
            classes = self._stand_in.take(classes)
        places: NDArray[np.intp] = np.multiply(classes, AGE_BUCKET_COUNT, dtype=np.intp)
        places += buckets
        return places

    def decay(self, factor: float) -> None:
        """Lets old evidence fade, so that the table follows the workload."""
        self._reuses *= factor
        self._exposure_s *= factor
        self._seen *= factor

    def needs_rebuild(self) -> bool:
        """Whether enough is new."""
        return self._new > REBUILD_SHARE * self._seen

    def rebuild(self, sampling_rate: float) -> None:
        """Computes `index` from the evidence.

        Args:
            sampling_rate: part of all blocks that is watched; SHRINK_BLOCKS counts all.
        """
        self._seen += self._new
        self._new = 0.0
        hazards = _hazards(self._reuses, self._exposure_s, SHRINK_BLOCKS * sampling_rate)
        # Classes without evidence differ by level only, so one of each kind stands for the others.
        told = np.logical_or(self._exposure_s.any(axis=1), self._reuses.any(axis=1))
        told[::REPLY_COUNT] = told.reshape(HISTORY_COUNT, REPLY_COUNT).any(axis=1)
        stand_in = np.where(told, np.arange(CLASS_COUNT), _KIND_OF_CLASS + CLASS_COUNT)
        chosen, places = np.unique(stand_in, return_inverse=True)
        kinds = chosen >= CLASS_COUNT
        first_of_kind = np.array(
            [int((stand_in == kind).argmax()) for kind in chosen[kinds].tolist()], dtype=np.intp
        )
        sources = chosen.copy()
        sources[kinds] = first_of_kind
        index = index_of(hazards[sources])[places]
        self.index[:] = (index if self._stand_in is None else index[self._stand_in]).ravel()

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        return self._reuses.nbytes + self._exposure_s.nbytes + self.index.nbytes


def _hazards(reuses: Table, exposure_s: Table, weight: float) -> Table:
    """Shrunk hazards per second, shape (CLASS_COUNT, ages).

    Levels: the class; then reused-or-not and the reply's end (running apart); then all.
    """
    shape = (HISTORY_COUNT // 2, 2, REPLY_COUNT // HINT_COUNT, HINT_COUNT, AGE_BUCKET_COUNT)
    reuses, exposure_s = _with_running(_smooth(reuses), shape), _with_running(_smooth(exposure_s), shape)
    by_end_r, by_end_e = reuses.sum(axis=0, keepdims=True), exposure_s.sum(axis=0, keepdims=True)
    known_r = by_end_r[:, :, 1:].sum(axis=2, keepdims=True)
    known_e = by_end_e[:, :, 1:].sum(axis=2, keepdims=True)
    prior = PRIOR_HAZARD / (AGE_MIDDLES_S + 5.0)
    running_r = by_end_r[:, :, :1].sum(axis=3, keepdims=True)
    running_e = by_end_e[:, :, :1].sum(axis=3, keepdims=True)
    overall = _shrink(
        running_r.sum(axis=1, keepdims=True), running_e.sum(axis=1, keepdims=True), prior, weight
    )
    hazards = np.empty(shape)
    running = _shrink(running_r, running_e, overall, weight)
    hazards[:, :, :1] = _shrink(reuses[:, :, :1], exposure_s[:, :, :1], running, weight)
    known = _shrink(known_r, known_e, overall, weight)
    hazards[:, :, 1:] = _shrink(reuses[:, :, 1:], exposure_s[:, :, 1:], known, weight)
    return hazards.reshape(CLASS_COUNT, AGE_BUCKET_COUNT)


def _with_running(table: Table, shape: tuple[int, ...]) -> Table:
    """The table in this shape, with every block counted as running too, as each once was.

    What a block is worth before its reply has ended is an average over all ends.
    """
    shaped = table.reshape(shape)
    shaped[:, :, 0, 0] = shaped.sum(axis=(2, 3))
    return shaped


def _shrink(reuses: Table, exposure_s: Table, coarser: Table, weight: float) -> Table:
    return (reuses + weight) / (exposure_s + weight / coarser)


def _smooth(table: Table) -> Table:
    for _ in range(SMOOTHING_PASSES):
        quarter = 0.25 * table
        table = 0.5 * table
        # Beyond its ends the table goes on as it ends.
        table[:, 1:] += quarter[:, :-1]
        table[:, 0] += quarter[:, 0]
        table[:, :-1] += quarter[:, 1:]
        table[:, -1] += quarter[:, -1]
    return table


def index_of(hazards: Table) -> Table:
    """V from hazards, same shape.

    Over a window the reuses gained, the seconds spent and the part that survives
    compose: a long window is two short ones in a row, the second weighed by what
    survives the first. The stopping time is sought among window lengths that grow
    by about a half.
    """
    survival = np.exp(-hazards * AGE_WIDTHS_S)
    gained = 1.0 - survival
    spent = gained / hazards
    windows = {1: (gained, spent, survival)}
    best = gained / spent
    for first, second in _WINDOWS:
        # Nothing happens beyond the last age.
        left = AGE_BUCKET_COUNT - first
        gain, cost, survival = (part.copy() for part in windows[first])
        gain_2, cost_2, survival_2 = (part[:, first:] for part in windows[second])
        gain[:, :left] += survival[:, :left] * gain_2
        cost[:, :left] += survival[:, :left] * cost_2
        survival[:, :left] *= survival_2
        survival[:, left:] = 0.0
        windows[first + second] = (gain, cost, survival)
        np.maximum(best, gain / cost, out=best)
    return best
