"""Importance times what a copy saves: the unit is then seconds saved per second kept.

What a copy saves depends on where else the block lies, so it is asked of the caller
per view. Where nothing is weighed, as many tokens hit as can be (importance.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.views import Nodes, TierView
from prefixd_server.policy.importance import ImportancePolicy

Saving = Callable[[TierView, Nodes], NDArray[np.float64]]
"""delta_T of the deepest block of each node in the view's tier, in seconds."""


class WeighedImportance(ImportancePolicy):
    """See the module. Ceilings for new blocks are the caller's to weigh: Newcomers.weight."""

    def __init__(self, saving: Saving) -> None:
        super().__init__()
        self._saving = saving

    def scores(self, view: TierView, nodes: Nodes, now: float) -> NDArray[np.float64]:
        """See DaemonPolicy."""
        scores: NDArray[np.float64] = super().scores(view, nodes, now) * self._saving(view, nodes)
        return scores

    def _score(self, view: TierView, node: int, now: float) -> float:
        saved = self._saving(view, np.array([node], dtype=np.int32))
        return super()._score(view, node, now) * float(saved[0])
