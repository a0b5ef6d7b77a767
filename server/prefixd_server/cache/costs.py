"""What a copy saves over the next slower place, from what engines report: delta_T of policy/cost.py.

A block's last copy saves its recomputation, which costs more the deeper it lies;
any other copy saves one transfer. Rates are learned per namespace: from prefill times
of finished requests, and from the engine's hints at Reserve.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_SLOT
from prefixd_server.base.views import Nodes, TierView
from prefixd_server.catalog.catalog import Catalog
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.policy.cost import ATTENTION_DOUBLING_TOKENS, TransferCost

TOKENS_PER_S_UNTOLD = 8000.0
"""Prefill rate at the start of a prompt until an engine tells: about an 8B model on one current GPU."""
NVME_READ = TransferCost(bytes_per_s=3e9, latency_s=1e-4)
"""One current drive; only its proportion to recomputation matters, and that is large either way."""
SMOOTHING = 0.1


class Costs:
    """See the module.

    Args:
        weighs: whether importance is multiplied by what is saved; if not, all blocks weigh the same.
    """

    def __init__(self, catalog: Catalog, weighs: bool) -> None:
        self._catalog = catalog
        self._weighs = weighs
        self._tokens_per_s: dict[int, float] = {}
        """Prefill rate at position 0, by namespace number."""

    # -- learning ------------------------------------------------------------------------------

    def measured(self, namespace: Namespace, first_token: int, token_count: int, seconds: float) -> None:
        """An engine has computed `token_count` tokens from that position on in so many seconds."""
        if token_count <= 0 or seconds <= 0:
            return
        middle = first_token + token_count / 2
        rate = token_count / seconds * (1 + middle / ATTENTION_DOUBLING_TOKENS)
        known = self._tokens_per_s.get(namespace.number, rate)
        self._tokens_per_s[namespace.number] = known + SMOOTHING * (rate - known)

    def tokens_per_s(self, namespace: Namespace) -> float:
        """Prefill rate at position 0."""
        return self._tokens_per_s.get(namespace.number, TOKENS_PER_S_UNTOLD)

    # -- asking --------------------------------------------------------------------------------

    def recompute_s(self, namespace: Namespace, depth: float) -> float:
        """Time to compute the block at that depth again."""
        tokens = namespace.spec.block_tokens
        return tokens / self.tokens_per_s(namespace) * (1 + depth * tokens / ATTENTION_DOUBLING_TOKENS)

    def weight_of_new(self, namespace: Namespace, depth: int) -> float:
        """The same for a block that is to be stored at that depth, its only copy."""
        return self.recompute_s(namespace, depth) if self._weighs else 1.0

    def per_byte(self, importance: float, slot_bytes: int) -> float:
        """Importance of a block as blocks of other sizes can be compared with it.

        Where nothing is weighed, what a byte saves is taken to be the same for all models.
        """
        return importance / slot_bytes if self._weighs else importance

    def weight(self, view: TierView, nodes: Nodes) -> NDArray[np.float64]:
        """delta_T of the deepest block of each node, in seconds."""
        catalog = self._catalog
        spaces, where = np.unique(catalog.tree.nodes.space.take(nodes), return_inverse=True)
        owners = [catalog.namespaces.owner(int(space)) for space in spaces]
        base = np.array([self.recompute_s(namespace, 0.0) for namespace, _, _ in owners])
        tokens = np.array([float(namespace.spec.block_tokens) for namespace, _, _ in owners])
        saved: NDArray[np.float64] = 1.0 + view.tail_depths(nodes) * tokens[where] / ATTENTION_DOUBLING_TOKENS
        saved *= base[where]
        sizes = [namespace.spec.kv_groups[group].slot_bytes for namespace, _, group in owners]
        read_s = np.array([NVME_READ.seconds(size) for size in sizes])[where]
        tails = catalog.tree.nodes.tail.take(nodes)
        for slower in (tier for tier in catalog.slots if tier > view.tier):
            below = catalog.columns.slot[slower].take(tails) != NO_SLOT
            saved = np.where(below, np.minimum(read_s, saved), saved)
        return saved
