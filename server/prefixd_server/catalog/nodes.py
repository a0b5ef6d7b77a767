"""The arrays of the prefix tree: one row per node, 118 bytes, and 18 for each further device of a tier.

A node is a radix segment: a chain of consecutive blocks with one history. Two
kinds of node have no blocks: the root of each space, and above the roots of all
spaces of a pool one pool node, which also heads the pool's recency lists.

Not here: how the arrays hang together (tree.py, presence.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Tier
from prefixd_server.catalog.columns import Columns, as_floats

Devices: TypeAlias = Mapping[Tier, Sequence[range]]
"""The slots of each device, of tiers that lie on several."""
ONE_EACH: Devices = MappingProxyType({})

NO_NODE = -1
NODE_LENGTH_MAX = 4096
"""Blocks of one node: bounds every walk along a node."""
NODES_WITHOUT_BLOCKS_MAX = 1 << 20
"""Roots of spaces and pools; their number is bounded by the namespaces."""

_SHARED: dict[str, tuple[Any, int]] = {
    "space": (np.uint32, 1),
    "parent": (np.int32, 1),
    "first_child": (np.int32, 1),
    "next_sibling": (np.int32, 1),
    "prev_sibling": (np.int32, 1),
    "child_count": (np.uint32, 1),
    "head": (np.int32, 1),
    "tail": (np.int32, 1),
    "length": (np.uint16, 1),
    "last_use": (np.float64, 1),
    "created": (np.float64, 1),
    "use_count": (np.uint32, 1),
    "attention": (np.float32, 1),
    "reused": (np.uint8, 1),
    "gap_class": (np.uint8, 1),
    "output_class": (np.uint8, 1),
    "hint": (np.uint8, 1),
}
_PER_TIER: dict[str, tuple[Any, int]] = {
    "copies": (np.uint16, 1),
    "kids": (np.uint32, 1),
    "older": (np.int32, 1),
    "newer": (np.int32, 1),
    "leaf_place": (np.uint32, 1),
}
HISTORY = (
    "last_use",
    "created",
    "use_count",
    "reused",
    "gap_class",
    "output_class",
    "hint",
)
"""Columns that both halves of a split node keep."""


class NodeViews:
    """The columns shared by all tiers as memoryviews, for walks."""

    def __init__(self, nodes: NodeColumns) -> None:
        self.space = nodes.space.data
        self.parent = nodes.parent.data
        self.first_child = nodes.first_child.data
        self.next_sibling = nodes.next_sibling.data
        self.prev_sibling = nodes.prev_sibling.data
        self.child_count = nodes.child_count.data
        self.head = nodes.head.data
        self.tail = nodes.tail.data
        self.length = nodes.length.data
        self.last_use = as_floats(nodes.last_use)
        self.created = as_floats(nodes.created)
        self.use_count = nodes.use_count.data
        self.attention = as_floats(nodes.attention)
        self.reused = nodes.reused.data
        self.gap_class = nodes.gap_class.data
        self.output_class = nodes.output_class.data
        self.hint = nodes.hint.data
        self.history: list[Any] = [getattr(nodes, name).data for name in HISTORY]


class NodeColumns(Columns):
    """See the module.

    head, tail: rows of the first and the deepest block; NO_ROW without blocks.
    parent: the node whose tail is the parent of our head; the space's root for a first
    block, the pool node for a root, NO_NODE for a pool node.
    The rest is told in base/views.py; the columns of one tier, or device, in presence.py.

    Args:
        devices: of tiers that lie on several.
    """

    space: NDArray[np.uint32]
    parent: NDArray[np.int32]
    first_child: NDArray[np.int32]
    next_sibling: NDArray[np.int32]
    prev_sibling: NDArray[np.int32]
    child_count: NDArray[np.uint32]
    head: NDArray[np.int32]
    tail: NDArray[np.int32]
    length: NDArray[np.uint16]
    last_use: NDArray[np.float64]
    created: NDArray[np.float64]
    use_count: NDArray[np.uint32]
    attention: NDArray[np.float32]
    reused: NDArray[np.uint8]
    gap_class: NDArray[np.uint8]
    output_class: NDArray[np.uint8]
    hint: NDArray[np.uint8]

    def __init__(self, node_count_max: int, devices: Devices) -> None:
        layout = dict(_SHARED)
        for tier in Tier:
            for device in range(len(devices[tier]) if tier in devices else 1):
                layout |= {_column(name, tier, device): kind for name, kind in _PER_TIER.items()}
        super().__init__(node_count_max, layout)
        self.mv = NodeViews(self)

    def of_tier(self, name: str, tier: Tier, device: int) -> NDArray[Any]:
        """One of the tier's own columns on a device: copies, kids, older, newer or leaf_place."""
        column: NDArray[Any] = getattr(self, _column(name, tier, device))
        return column

    # -- what the policy makes of the use of a node --------------------------------------------

    def classify(self, nodes: list[int], history: int) -> None:
        """A request used these nodes, and its reply is still to come."""
        gap_class, output_class = self.mv.gap_class, self.mv.output_class
        for node in nodes:
            gap_class[node] = history
            output_class[node] = 0

    def mark_returned(self, nodes: list[int]) -> None:
        """These new nodes were used before they were forgotten; what follows must not be appended to them."""
        for node in nodes:
            self.mv.reused[node] = 1
            self.mv.use_count[node] = 2

    def end_reply(self, nodes: list[int], used_at: float, reply: int) -> None:
        """The reply to the request that used these nodes then has ended; those used since stay."""
        last_use, output_class = self.mv.last_use, self.mv.output_class
        for node in nodes:
            if last_use[node] == used_at:
                output_class[node] = reply


def _column(name: str, tier: Tier, device: int) -> str:
    return f"{name}_{tier.name.lower()}_{device}"
