"""The least important leaves of a view at the last look: not every eviction has to look at all of them.

Whoever evicts from the same view again and again keeps one and hands it to the
policy each time. What is on it is passed over once it was used again or is no
leaf any more; what came since waits for the next look.

Not here: what leaves are worth (importance.py).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.views import Nodes, TierView
from prefixd_server.policy.choice import Choice

NEVER = float("inf")
GOOD_FOR_S = 5.0
"""After so long, ages are of another class (signals.py)."""
SHARE = 1 / 16
"""Of the leaves that are listed: what came since the look is about as many when the list is used up."""
COUNT_MAX = 64

Entry = tuple[float, int, int, float]
"""(minus its score, place among the leaves, node, last use): of equals what became a leaf last goes first."""
Scored = tuple[Nodes, NDArray[np.float64]]


class Shortlist:
    """See the module."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        """Ascending, so the least important last."""
        self._bound = NEVER
        """What leaves that are not listed are worth at least."""
        self._looked_at = -NEVER

    def take(
        self,
        choice: Choice,
        look: Callable[[], Scored],
        score_of: Callable[[int], float],
        ceiling: float,
        now: float,
    ) -> None:
        """Takes leaves from the lowest score on, and what becomes a leaf by it.

        Args:
            look: all leaves and their scores.
            score_of: of a node that becomes a leaf.
            ceiling: scores from here on stay.
        """
        if now - self._looked_at > GOOD_FOR_S:
            self._entries.clear()
        looks = iter((SHARE, 1.0))
        born: list[Entry] = []
        while choice.left > 0:
            if not self._entries or -self._entries[-1][0] > self._bound:
                share = next(looks, None)
                if share is None:
                    break
                self._list(choice.view, *look(), share, now)
                for entry in born:
                    insort(self._entries, entry)
                continue
            score, _, node, used_at = self._entries[-1]
            if node in choice.met or choice.view.last_use[node] != used_at or not choice.is_leaf(node):
                self._entries.pop()
                continue
            if -score >= ceiling:
                break
            above = choice.take(node)
            if choice.left > 0 or not choice.stays(node):
                self._entries.pop()
            if above >= 0:
                last_use = float(choice.view.last_use[above])
                born.append((-score_of(above), choice.view.leaf_count, above, last_use))
                insort(self._entries, born[-1])
        if self._bound == NEVER:
            # All leaves are listed: that list is too long to be kept while others become leaves.
            self._entries.clear()

    def _list(
        self, view: TierView, nodes: Nodes, scores: NDArray[np.float64], share: float, now: float
    ) -> None:
        self._looked_at = now
        self._bound = NEVER
        places = np.arange(len(nodes))
        count = len(nodes) if share == 1.0 else min(COUNT_MAX, max(1, int(share * len(nodes))))
        if count < len(nodes):
            places = scores.argpartition(count)[:count]
            self._bound = float(scores.take(places).max())
        nodes = nodes.take(places)
        used_at = view.last_use.take(nodes)
        self._entries = sorted(
            zip(
                (-scores.take(places)).tolist(),
                places.tolist(),
                nodes.tolist(),
                used_at.tolist(),
                strict=True,
            )
        )
