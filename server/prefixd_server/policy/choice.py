"""Taking victims in the order of a score, leaves first.

A node becomes a leaf when all below it is taken, and then stands in line with
the others: within one call, without the catalog being changed meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.views import Nodes, TierView
from prefixd_server.policy.policy import Victims


class Choice:
    """Victims as they are chosen, and what that makes of the nodes above them.

    Args:
        block_count: copies wanted; `left` of them are still to be found.
    """

    def __init__(self, view: TierView, block_count: int) -> None:
        self.left = block_count
        self.victims: Victims = []
        self.met: set[int] = set()
        """Nodes asked already, whether or not anything of them may go."""
        self.view = view
        self._gone_kids: dict[int, int] = {}

    def take(self, node: int) -> int:
        """Takes what may go of a leaf; the node above when that is a leaf then, else -1."""
        view = self.view
        self.met.add(node)
        going = view.evictable(node, self.left)
        if going == 0:
            return -1
        self.victims.append((node, going))
        self.left -= going
        if going < int(view.copies[node]):
            return -1
        while True:
            node = int(view.parent[node])
            if node < 0:
                return -1
            gone = self._gone_kids.get(node, 0) + 1
            self._gone_kids[node] = gone
            if gone < int(view.kids[node]):
                return -1
            if view.copies[node]:
                return node

    def is_leaf(self, node: int) -> bool:
        """Whether the node has copies and none below it, but for what was taken."""
        return bool(self.view.copies[node]) and self.view.kids[node] == self._gone_kids.get(node, 0)

    def stays(self, node: int) -> bool:
        """Whether something stays of the node that was asked last."""
        return not self.victims or self.victims[-1] != (node, int(self.view.copies[node]))


def take_lowest(
    choice: Choice,
    nodes: Nodes,
    scores: NDArray[np.float64],
    score_of: Callable[[int], float],
    ceiling: float,
    count_max: int,
) -> bool:
    """Takes leaves from the lowest score on, and what becomes a leaf by it.

    Args:
        nodes, scores: leaves, in any order; those met before are passed over.
        score_of: of a node that becomes a leaf.
        ceiling: scores from here on stay.
        count_max: only so many of the lowest leaves are looked at; their scores are spoilt when they are few.

    Returns:
        Whether the ceiling was met.
    """
    leaves = _ascending(nodes, scores, count_max)
    leaf = next(leaves, None)
    following: list[tuple[float, int]] = []
    while choice.left > 0 and (leaf is not None or following):
        if following and (leaf is None or following[0] < leaf):
            score, node = heapq.heappop(following)
        else:
            assert leaf is not None
            (score, node), leaf = leaf, next(leaves, None)
            if node in choice.met:
                continue
        if score >= ceiling:
            return True
        above = choice.take(node)
        if above >= 0:
            heapq.heappush(following, (score_of(above), above))
    return False


def _ascending(nodes: Nodes, scores: NDArray[np.float64], count_max: int) -> Iterator[tuple[float, int]]:
    """The lowest leaves with their scores: sorted all at once, or one by one where few are wanted of many."""
    if count_max >= len(nodes):
        order = scores.argsort()
        yield from zip(scores.take(order).tolist(), nodes.take(order).tolist(), strict=True)
        return
    for _ in range(count_max):
        place = int(scores.argmin())
        yield float(scores[place]), int(nodes[place])
        scores[place] = np.inf
