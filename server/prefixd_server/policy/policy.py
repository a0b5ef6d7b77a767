"""What every eviction policy is: a pure choice of victims from a view.

Policies neither change the catalog nor read a clock. What a policy learns from
accesses is its own affair (importance.py).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.views import Nodes, TierView

Victims = list[tuple[int, int]]
"""(node, how many of its deepest copies), in the order in which they go."""


class Policy(Protocol):
    """Chooses what leaves a pool of a tier."""

    @property
    def name(self) -> str:
        """As configured and reported."""
        ...

    def victims(self, view: TierView, block_count: int, now: float, rng: np.random.Generator) -> Victims:
        """Nodes whose deepest copies go, in that order: enough to free `block_count`, or all that may go.

        A node comes after every node below it that has copies in the tier, and each
        node comes once. The caller takes the victims in order, or a leading part.

        Args:
            block_count: copies to drop; the victims' counts add up to at most that.
            now: monotonic seconds.
            rng: the only source of randomness.
        """
        ...


class DaemonPolicy(Policy, Protocol):
    """A policy that can also say why."""

    def scores(self, view: TierView, nodes: Nodes, now: float) -> NDArray[np.float64]:
        """What the deepest block of each node is worth; the lowest of a view goes first."""
        ...

    def explain(self, view: TierView, node: int, now: float) -> dict[str, str]:
        """What is known of a node, by name, in words."""
        ...
