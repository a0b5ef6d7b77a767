"""What a policy is that learns from the requests, beyond choosing victims.

The order of calls per request stands in importance.py.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np

from prefixd_server.base.types import Hashes, StopReason
from prefixd_server.base.views import TierView
from prefixd_server.policy.importance import Access, Newcomers
from prefixd_server.policy.policy import DaemonPolicy, Policy, Victims
from prefixd_server.policy.shortlist import Shortlist


@runtime_checkable
class LearningPolicy(DaemonPolicy, Protocol):
    """See the module; importance.ImportancePolicy tells what each call means."""

    def on_access(
        self,
        hashes: Hashes,
        hit_count: int,
        hit_idle_s: float,
        hit_fanout: int,
        now: float,
    ) -> Access:
        """A request starts."""
        ...

    def newcomers(self, hashes: Hashes, history_above: int, now: float) -> Newcomers:
        """Blocks that a request missed are stored."""
        ...

    def on_finish(self, access: Access, output_token_count: int, stop: StopReason) -> int:
        """Its reply has ended."""
        ...

    def victims_for(
        self,
        view: TierView,
        block_count: int,
        history: int,
        now: float,
        rng: np.random.Generator,
        depth: int = 0,
        shortlist: Shortlist | None = None,
    ) -> Victims:
        """Victims that are worth less than new blocks."""
        ...

    def victims_below(
        self,
        view: TierView,
        block_count: int,
        ceiling: float,
        now: float,
        rng: np.random.Generator,
        shortlist: Shortlist | None = None,
    ) -> Victims:
        """Victims that are worth less than `ceiling`."""
        ...

    def ceiling_for_new(self, history: int, depth: int = 0) -> float:
        """What new blocks of this history displace is worth less than this."""
        ...


_LEARNS: dict[type, bool] = {}


def learns(policy: Policy) -> TypeGuard[LearningPolicy]:
    """Whether the policy is one that learns; to look through its methods takes 60 us, and is done once."""
    kind = type(policy)
    if kind not in _LEARNS:
        _LEARNS[kind] = isinstance(policy, LearningPolicy)
    return _LEARNS[kind]
