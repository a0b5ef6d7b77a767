"""Plays an engine's process against a Node: writes runs, reads runs, dies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from prefixd_server.base.types import Acquired, Committed, NamespaceRef, Reserved
from prefixd_server.cache.sessions import Session

from tests.support.node import Node, block_data, chain, checksum, packed, write_blocks


@dataclass
class Engine:
    """One process of an engine instance, on one namespace with one shard in use."""

    node: Node
    session: Session
    ref: NamespaceRef
    block_bytes: int = 65_536
    shard: int = 0

    @property
    def tenant(self) -> str:
        """Whose engine it is."""
        return self.session.tenant

    def reserve(self, hashes: list[bytes], parent: bytes | None = None) -> Reserved:
        """Slots for a run."""
        above = packed([parent]) if parent else None
        ids = (self.tenant, self.session.session_id, self.ref, self.shard, 0)
        return self.node.cache.reserve(*ids, above, packed(hashes), None)

    def commit(
        self, reserved: Reserved, hashes: list[bytes], before: int = 0, write: bool = True
    ) -> Committed:
        """Writes the honest bytes of the lease's blocks and commits those from `before` on."""
        assert reserved.lease is not None
        datas = [block_data(key, self.shard, self.block_bytes) for key in hashes]
        if write:
            write_blocks(self.node, reserved.extents, datas)
        sums = np.array([checksum(data) for data in datas[before:]], dtype=np.uint64)
        return self.node.cache.commit(
            self.tenant, self.session.session_id, reserved.lease.token, before, sums
        )

    def put(self, *parts: object) -> list[bytes]:
        """Stores the whole path from the root; its hashes."""
        hashes = chain(*parts)
        reserved = self.reserve(hashes)
        if reserved.lease is not None:
            count = sum(extent.block_count for extent in reserved.extents)
            self.commit(reserved, hashes[len(hashes) - count :])
        return hashes

    def acquire(self, hashes: list[bytes], skip: int = 0) -> Acquired:
        """Leases a run with its extents."""
        ids = (self.tenant, self.session.session_id, self.ref)
        return self.node.cache.acquire(*ids, packed(hashes), skip, (self.shard,), None)

    def hits(self, hashes: list[bytes]) -> int:
        """What Lookup says."""
        return self.node.cache.lookup(self.tenant, self.ref, packed(hashes)).hit_count

    def loses_its_connection(self) -> None:
        """The transport is gone; the process may live."""
        self.node.cache.sessions.transport_lost(self.session.session_id)

    def dies(self) -> None:
        """The kernel says that the process is dead."""
        self.node.cache.companions.process_dead(self.session.session_id)


def slot_counts(node: Node) -> tuple[int, int, int, int]:
    """(free, reserved, resident, quarantined) slots of the DRAM tier."""
    (tier,) = node.cache.stats(None).tiers
    return (
        tier.free_slot_count,
        tier.reserved_slot_count,
        tier.resident_slot_count,
        tier.quarantined_slot_count,
    )
