"""Established policies made to evict tails of leaf nodes, so that what they keep is closed under ancestors.

gdsf: GreedyDual-Size-Frequency; a leaf's value is an inflation floor plus its
uses times its recomputation cost. 2q: blocks used once wait in a probation queue
of a tenth of the tier. arc: the share of blocks used once adapts to ghost hits.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.views import Nodes, TierView
from prefixd_server.policy.choice import Choice, take_lowest
from prefixd_server.policy.cost import RecomputeCost
from prefixd_server.policy.policy import Victims

NEVER = float("inf")
PROBATION_SHARE = 0.1
GHOST_SHARE = 4.0
"""2Q remembers so many times the tier's blocks; with half of them, as its authors advise, it hits less."""
FLOOR_COUNT_START = 1024
_AFTER_ALL_TIMES = 1e15
"""Added to a time to put it after all others; doubles keep milliseconds up to it."""


@runtime_checkable
class ReplayListener(Protocol):
    """A policy that also hears of misses and evictions, by block id."""

    def missed(self, ids: NDArray[np.int32]) -> int:
        """These blocks of a run were not there. How many of the leading ones are remembered."""
        ...

    def evicted(self, ids: NDArray[np.int32], reused: bool) -> None:
        """These blocks were evicted; `reused` tells whether they had been used again."""
        ...


class GdsfTree:
    """See the module. A node keeps the floor that there was when it was last used."""

    name = "gdsf"

    def __init__(self, block_tokens: int) -> None:
        self._cost = RecomputeCost(1.0, block_tokens)
        self._raised_at: NDArray[np.float64] = np.zeros(FLOOR_COUNT_START)
        self._floors: NDArray[np.float64] = np.zeros(FLOOR_COUNT_START)
        self._raised_count = 1

    def victims(self, view: TierView, block_count: int, now: float, rng: np.random.Generator) -> Victims:
        """See Policy."""
        del rng
        nodes = view.leaves()
        scores = self._values(view, nodes)
        choice = Choice(view, block_count)

        def value_of(node: int) -> float:
            return float(self._values(view, np.array([node], dtype=np.int32))[0])

        take_lowest(choice, nodes, scores, value_of, NEVER, len(nodes))
        if choice.victims:
            self._raise_floor(value_of(choice.victims[-1][0]), now)
        return choice.victims

    def _raise_floor(self, value: float, now: float) -> None:
        """What is used from now on counts from the value of the last victim."""
        count = self._raised_count
        if value <= self._floors[count - 1]:
            return
        if count == len(self._floors):
            self._raised_at, self._floors = (
                np.concatenate([old, np.zeros(count)]) for old in (self._raised_at, self._floors)
            )
        self._raised_at[count], self._floors[count] = now, value
        self._raised_count += 1

    def _values(self, view: TierView, nodes: Nodes) -> NDArray[np.float64]:
        """The floor at the last use, and the uses times the cost of the deepest block."""
        gains = view.use_count[nodes] * self._cost.seconds(view.tail_depths(nodes))
        # A floor that was raised at that very moment came after the use.
        places = np.searchsorted(self._raised_at[1 : self._raised_count], view.last_use[nodes])
        values: NDArray[np.float64] = self._floors[places] + gains
        return values


class TwoQTree:
    """See the module. Blocks that come back while they are remembered skip probation.

    Args:
        capacity_blocks: of the tier; GHOST_SHARE times as many ghosts are remembered.
    """

    name = "2q"

    def __init__(self, capacity_blocks: int) -> None:
        self._probation_blocks = PROBATION_SHARE * capacity_blocks
        self._ghost_count_max = max(1, int(GHOST_SHARE * capacity_blocks))
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def missed(self, ids: NDArray[np.int32]) -> int:
        """See ReplayListener."""
        remembered = 0
        for place, block in enumerate(ids.tolist()):
            if block in self._ghosts:
                del self._ghosts[block]
                remembered = place + 1
        return remembered

    def evicted(self, ids: NDArray[np.int32], reused: bool) -> None:
        """See ReplayListener. Only what leaves probation is remembered."""
        if reused:
            return
        for block in ids.tolist():
            self._ghosts[block] = None
        while len(self._ghosts) > self._ghost_count_max:
            self._ghosts.popitem(last=False)

    def victims(self, view: TierView, block_count: int, now: float, rng: np.random.Generator) -> Victims:
        """See Policy. First in, first out of probation while it is too large; else the oldest use."""
        del now, rng
        nodes = view.leaves()
        reused = view.reused[nodes] != 0
        crowded = int(view.copies[nodes[~reused]].sum()) > self._probation_blocks
        return _two_lists(view, block_count, nodes, reused, crowded, view.created[nodes])


class ArcTree:
    """See the module.

    Args:
        capacity_blocks: of the tier, and of the ghosts.
    """

    name = "arc"

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._target = 0.0
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()

    def missed(self, ids: NDArray[np.int32]) -> int:
        """See ReplayListener. Ghost hits move the target."""
        remembered = 0
        for place, block in enumerate(ids.tolist()):
            if block in self._once:
                step = max(1.0, len(self._again) / len(self._once))
                self._target = min(self._target + step, float(self._capacity))
                del self._once[block]
            elif block in self._again:
                step = max(1.0, len(self._once) / len(self._again))
                self._target = max(self._target - step, 0.0)
                del self._again[block]
            else:
                continue
            remembered = place + 1
        return remembered

    def evicted(self, ids: NDArray[np.int32], reused: bool) -> None:
        """See ReplayListener."""
        ghosts = self._again if reused else self._once
        for block in ids.tolist():
            ghosts[block] = None
        while len(ghosts) > self._capacity:
            ghosts.popitem(last=False)

    def victims(self, view: TierView, block_count: int, now: float, rng: np.random.Generator) -> Victims:
        """See Policy."""
        del now, rng
        nodes = view.leaves()
        reused = view.reused[nodes] != 0
        crowded = int(view.copies[nodes[~reused]].sum()) > self._target
        return _two_lists(view, block_count, nodes, reused, crowded, view.last_use[nodes])


def _two_lists(
    view: TierView,
    block_count: int,
    nodes: Nodes,
    reused: NDArray[np.bool_],
    once_first: bool,
    once_keys: NDArray[np.float64],
) -> Victims:
    """Blocks used once by `once_keys`, those used again by last use; one list entirely before the other."""
    scores = np.where(reused, view.last_use[nodes], once_keys)
    scores[reused == once_first] += _AFTER_ALL_TIMES
    choice = Choice(view, block_count)

    def score_of(node: int) -> float:
        late = bool(view.reused[node]) == once_first
        return float(view.last_use[node]) + (_AFTER_ALL_TIMES if late else 0.0)

    take_lowest(choice, nodes, scores, score_of, NEVER, len(nodes))
    return choice.victims
