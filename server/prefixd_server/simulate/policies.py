"""The policies that can be simulated, by name."""

from __future__ import annotations

from collections.abc import Callable

from prefixd_server.policy.importance import ImportancePolicy
from prefixd_server.policy.lru import LruPolicy
from prefixd_server.policy.policy import Policy
from prefixd_server.simulate.baselines.flat import FlatCache, S3Fifo, WTinyLfu
from prefixd_server.simulate.baselines.tree import ArcTree, GdsfTree, TwoQTree
from prefixd_server.simulate.traces import Trace

OPTIMUM = "optimum"
"""Not a policy: the bound that no policy can pass (optimum.py)."""
DAEMON_POLICIES = ("importance", "lru")
"""What ships in the daemon."""

TREE: dict[str, Callable[[Trace, int], Policy]] = {
    "importance": lambda _trace, _capacity: ImportancePolicy(),
    "lru": lambda _trace, _capacity: LruPolicy(),
    "gdsf": lambda trace, _capacity: GdsfTree(trace.block_tokens),
    "2q": lambda _trace, capacity: TwoQTree(capacity),
    "arc": lambda _trace, capacity: ArcTree(capacity),
}
"""By name: (trace, capacity in blocks) -> a policy over the prefix tree."""

FLAT: dict[str, Callable[[int], FlatCache]] = {"s3fifo": S3Fifo, "wtinylfu": WTinyLfu}
"""By name: capacity in blocks -> a cache of single blocks."""

NAMES = (*TREE, *FLAT, OPTIMUM)
SEEDED = frozenset({"importance"})
"""Policies that draw lots; the others give the same result for every seed."""
