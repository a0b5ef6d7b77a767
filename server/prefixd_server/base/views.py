"""What a policy sees of one pool of one tier.

A policy is pure: it reads a view and names victims; the catalog is not changed
while it does. Nodes are the prefix tree's radix segments: chains of blocks with
one history, numbered; every array here is indexed by node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Tier

Nodes = NDArray[np.int32]
"""Prefix-tree nodes."""

Evictable = Callable[[int, int], int]
"""(node, limit) -> how many of the node's deepest copies in the tier may go now, at most limit,
*given that every copy below the node in this tier goes before*."""


class TierView(Protocol):
    """See the module. The arrays are the tree's own, not copies: read only.

    Scalars read by index are numpy scalars; int() or float() them where that matters.
    """

    @property
    def tier(self) -> Tier:
        """The tier."""
        ...

    @property
    def leaf_count(self) -> int:
        """Nodes with copies in the tier and none below them there."""
        ...

    def leaves(self) -> Nodes:
        """Those nodes, in no order, shape (leaf_count,); a view that the next change of the tree spoils."""
        ...

    def oldest(self) -> Iterator[int]:
        """Leaves from the least to the most recently used.

        The caller may evict between steps: when the last node given has left the
        list, iteration starts again at the old end, so nodes that could not be
        evicted are seen again.
        """
        ...

    def by_age(self) -> Iterator[int]:
        """All nodes with copies in the tier, least recently used first; a node comes before its ancestors.

        Robust against eviction as `oldest` is.
        """
        ...

    def tail_depths(self, nodes: Nodes) -> NDArray[np.uint32]:
        """Depth of each node's deepest block (blocks before it in its run)."""
        ...

    def evictable(self, node: int, limit: int) -> int:
        """See Evictable."""
        ...

    @property
    def parent(self) -> Nodes:
        """Parent node; the chain upward ends at nodes without blocks, whose parent is negative at last."""
        ...

    @property
    def length(self) -> NDArray[np.uint16]:
        """Blocks of the node."""
        ...

    @property
    def copies(self) -> NDArray[np.uint16]:
        """Blocks of the node with a copy in the tier."""
        ...

    @property
    def kids(self) -> NDArray[np.uint32]:
        """Child nodes with copies in the tier, in them or below them."""
        ...

    @property
    def last_use(self) -> NDArray[np.float64]:
        """When it was last used, seconds; its making counts."""
        ...

    @property
    def created(self) -> NDArray[np.float64]:
        """When it was made, seconds."""
        ...

    @property
    def use_count(self) -> NDArray[np.uint32]:
        """Requests that used it; the one that made it counts."""
        ...

    @property
    def reused(self) -> NDArray[np.uint8]:
        """1 when a request after the one that made it used it."""
        ...

    @property
    def attention(self) -> NDArray[np.float32]:
        """Attention mass that engines reported, summed over its blocks."""
        ...

    @property
    def gap_class(self) -> NDArray[np.uint8]:
        """Class byte of the policy: gap between uses of its conversation."""
        ...

    @property
    def output_class(self) -> NDArray[np.uint8]:
        """Class byte of the policy: length of the reply that followed."""
        ...

    @property
    def hint(self) -> NDArray[np.uint8]:
        """Class byte of the policy: how that reply ended."""
        ...
