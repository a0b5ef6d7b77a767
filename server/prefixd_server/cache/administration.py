"""What operators ask and order: describe, list, pin, drop, statistics. Not here: evict (evicting.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import numpy as np

from prefixd_server.base.accounts import (
    BlockInfo,
    CopyInfo,
    Counters,
    LeaseInfo,
    NamespaceInfo,
    Stats,
    TierStats,
)
from prefixd_server.base.errors import LimitReached, StateConflict, Unavailable
from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.logs import logger
from prefixd_server.base.types import NO_ROW, NO_SLOT, Hashes, LeaseKind, NamespaceRef, SlotState, Tier
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.epochs import Epochs
from prefixd_server.cache.hbm_tier import HbmTier
from prefixd_server.cache.nvme_health import NvmeState
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.room import Room
from prefixd_server.cache.sessions import Sessions
from prefixd_server.cache.state import State
from prefixd_server.catalog.columns import PINNED, VISIBLE
from prefixd_server.catalog.events import PinChanged
from prefixd_server.catalog.leases import ReadLease, WriteLease
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.media.movers import CallJob

LIST_COUNT_MAX = 10_000
PROBE_BLOCK_COUNT = 64
RELEASES_IN_A_STEP = 32
SAVE_RETRY_S = 5.0
"""Between attempts to make a drop durable that could not be."""
_WRITING = "WRITING"

log = logger(__name__)


class Administration:
    """See the module."""

    def __init__(
        self,
        state: State,
        sessions: Sessions,
        endings: Endings,
        room: Room,
        epochs: Epochs,
        nvme: NvmeTier | None,
        started_at: float,
        hbm: HbmTier | None = None,
        nvme_failure: str = "",
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._endings = endings
        self._room = room
        self._epochs = epochs
        self._nvme = nvme
        self._hbm = hbm
        self._nvme_failure = nvme_failure
        """Why the NVMe tier could not be opened; empty when it could, or is off."""
        self._started_at = started_at

    # -- looking -------------------------------------------------------------------------------

    def describe(
        self, tenant: str, ref: NamespaceRef, shard: int, kv_group: int, key: Hashes
    ) -> BlockInfo | None:
        """Everything known about one block, None when it is not known. `key` has shape (1, 4)."""
        catalog = self._state.catalog
        namespace = catalog.namespaces.get(tenant, ref)
        space = catalog.namespaces.space(namespace, shard, kv_group)
        row = int(catalog.find(space, key)[0])
        if space is None or row == NO_ROW:
            return None
        columns = catalog.columns
        parent = int(columns.parent[row])
        node = int(columns.node[row])
        now = self._state.clock.now()
        return BlockInfo(
            visible=bool(columns.flags[row] & VISIBLE),
            parent_hash=b""
            if parent == NO_ROW
            else columns.key[parent].tobytes()[: namespace.spec.hash_bytes],
            depth=int(columns.depth[row]),
            child_count=int(columns.children[row]),
            copies=tuple(self._copies(row)),
            checksum=int(columns.checksum[row]),
            pinned=bool(columns.flags[row] & PINNED),
            idle_s=max(0.0, now - float(catalog.tree.last_use[node])),
            use_count=int(catalog.tree.use_count[node]),
            story=catalog.story(space, key, now),
        )

    def _copies(self, row: int) -> list[CopyInfo]:
        copies = []
        for tier, table in self._state.catalog.slots.items():
            slot = int(self._state.catalog.columns.slot[tier][row])
            if slot != NO_SLOT:
                (extent,) = table.extents(np.array([slot], dtype=np.uint32), None)
                state = SlotState(int(table.state[slot]))
                name = _WRITING if state is SlotState.RESERVED else state.name
                copies.append(
                    CopyInfo(tier, extent.segment_id, extent.offset_bytes, name, int(table.leases[slot]))
                )
        return copies

    def list_namespaces(self, tenant: str) -> list[NamespaceInfo]:
        """The tenant's namespaces, newest first."""
        tree = self._state.catalog.tree
        answers = []
        for namespace in self._state.catalog.namespaces.list(tenant)[:LIST_COUNT_MAX]:
            blocks = size = 0
            for (_, group), space in namespace.spaces.items():
                count = tree.block_count(space)
                blocks += count
                size += count * namespace.spec.kv_groups[group].slot_bytes
            answers.append(NamespaceInfo(namespace.ref, namespace.spec, blocks, size, namespace.opened_at))
        return answers

    def list_leases(self, tenant: str) -> list[LeaseInfo]:
        """Who holds what since when, oldest first; also what ended reads still hold in HBM."""
        now = self._state.clock.now()
        leases = self._state.leases.of_tenant(tenant)[:LIST_COUNT_MAX]
        orphans = islice(self._orphans(tenant), LIST_COUNT_MAX)
        listed = [*(self._lease_info(lease, now) for lease in leases), *orphans]
        return sorted(listed, key=lambda info: info.taken_at)[:LIST_COUNT_MAX]

    def _orphans(self, tenant: str) -> Iterator[LeaseInfo]:
        """One for each lease and process whose word or death is waited for."""
        for orphan in self._state.leases.orphans.values():
            if orphan.tenant == tenant:
                for holder in dict.fromkeys(hold.holder for hold in orphan.shards.values()):
                    shards = {shard: hold for shard, hold in orphan.shards.items() if hold.holder == holder}
                    part = replace(orphan, shards=shards, pid=self._sessions.pid_of(holder))
                    yield replace(self._lease_info(part, part.expires_at), quarantined=True)

    def _lease_info(self, lease: ReadLease | WriteLease, now: float) -> LeaseInfo:
        reads = isinstance(lease, ReadLease)
        return LeaseInfo(
            token_prefix=lease.token[:4].hex(),
            kind=LeaseKind.READ if reads else LeaseKind.WRITE,
            instance_id=lease.instance_id,
            pid=lease.pid,
            namespace=lease.namespace.ref,
            slot_count=lease.slot_count if isinstance(lease, ReadLease) else len(lease.open_slots),
            open_shards=tuple(sorted(lease.shards)) if isinstance(lease, ReadLease) else (lease.shard,),
            taken_at=lease.taken_at_wall,
            expires_after_s=max(0.0, lease.expires_at - now),
            quarantined=isinstance(lease, WriteLease) and lease.quarantined,
        )

    def stats(self, tenant: str | None) -> Stats:
        """Of one tenant's traffic, or of all (None); tiers are the whole node's."""
        state = self._state
        counters = (
            sum_counters(list(state.counters.values())) if tenant is None else state.counters_of(tenant)
        )
        return Stats(
            tiers=self._tiers(tenant),
            counters=counters,
            lease_count=state.leases.live_count(tenant),
            session_count=len(self._sessions.open_of(tenant)),
            metadata_bytes=state.metadata_bytes,
            block_count=self._block_count(tenant),
            draining=state.draining,
            uptime_s=state.clock.now() - self._started_at,
        )

    def _block_count(self, tenant: str | None) -> int:
        if tenant is None:
            return self._state.catalog.columns.count
        tree = self._state.catalog.tree
        mine = self._state.catalog.namespaces.list(tenant)
        return sum(tree.block_count(space) for namespace in mine for space in namespace.spaces.values())

    def _tiers(self, tenant: str | None) -> tuple[TierStats, ...]:
        pools = self._pools(tenant)
        others = [tier.stats(pools) for tier in (self._hbm, self._nvme) if tier is not None]
        if self._nvme_failure:
            others.append(TierStats(Tier.NVME, state=NvmeState.FAILED.value, state_reason=self._nvme_failure))
        return (self._dram_stats(tenant), *others)

    def _pools(self, tenant: str | None) -> list[int]:
        names = self._state.catalog.namespaces
        return list(range(names.pool_count)) if tenant is None else names.pools_of_tenant(tenant)

    def _dram_stats(self, tenant: str | None) -> TierStats:
        dram = self._state.dram
        return replace(
            self._state.catalog.slots[Tier.DRAM].stats(Tier.DRAM, self._pools(tenant)),
            prefaulted_bytes=dram.prefaulted_bytes,
            numa_nodes=dram.numa_nodes,
            page_kind=dram.page_kind,
        )

    # -- acting --------------------------------------------------------------------------------

    def pin(self, tenant: str, ref: NamespaceRef, hashes: Hashes, pinned: bool) -> int:
        """Pins or unpins the kept blocks of a run; blocks changed, over all shards and groups."""
        catalog = self._state.catalog
        namespace = catalog.namespaces.get(tenant, ref)
        changed = 0
        for space in namespace.spaces.values():
            # Where little of a long run is kept, little of it is looked for.
            rows = catalog.find_prefix(space, hashes[:PROBE_BLOCK_COUNT])
            if len(rows) == PROBE_BLOCK_COUNT:
                rows = catalog.find_prefix(space, hashes)
            rows = rows[catalog.visible(rows)]
            rows = rows[((catalog.columns.flags[rows] & PINNED) != 0) != pinned]
            if len(rows):
                self._state.apply(PinChanged(rows, pinned))
                changed += len(rows)
        return changed

    async def drop_namespace(self, tenant: str, ref: NamespaceRef) -> tuple[int, int]:
        """Forgets a namespace at once, durably. (new epoch, blocks forgotten).

        Raises:
            StateConflict: NAMESPACE_EPOCH_STALE: it was dropped, and that is durable.
            Unavailable: DROP_NOT_DURABLE: it is forgotten, and run() makes that durable as soon as it can.
        """
        self._state.refuse_when_handed_over()
        catalog = self._state.catalog
        try:
            namespace = catalog.namespaces.get(tenant, ref)
        except StateConflict:
            await self._save_epochs()
            raise
        blocks = sum(catalog.tree.block_count(space) for space in namespace.spaces.values())
        new_epoch = self._epochs.after(tenant, ref.fingerprint, ref.epoch)
        self._room.discard(catalog.namespaces.drop(namespace, new_epoch))
        await self._save_epochs()
        failpoint("drop.durable")
        await asyncio.sleep(0)  # forgetting it was a step of its own
        await self._end_reads(namespace)
        return new_epoch, blocks

    async def run(self) -> None:
        """Makes up for drops that could not be made durable, for ever; ends when cancelled."""
        while True:
            await asyncio.sleep(SAVE_RETRY_S)
            if not self._state.handed_over:
                with suppress(Unavailable):
                    await self._save_epochs()

    async def _save_epochs(self) -> None:
        """Returns when every drop is durable. Raises Unavailable DROP_NOT_DURABLE."""
        if not self._epochs.are_owed:
            return
        try:
            await self._state.movers.run(CallJob(self._epochs.save))
        except (OSError, LimitReached) as error:
            log.warning("a dropped namespace would be back after a restart", reason=str(error))
            reason = error.strerror if isinstance(error, OSError) else error.message
            raise Unavailable(
                "DROP_NOT_DURABLE",
                f"the namespace is forgotten, and would be back after a restart ({reason}); the daemon goes "
                "on trying to make that durable",
                retry_after_s=SAVE_RETRY_S,
            ) from error

    async def _end_reads(self, namespace: Namespace) -> None:
        """Readers verify what they copied, so their leases can end under them."""
        reads = self._state.leases.reads
        mine = [lease for lease in reads.values() if lease.namespace is namespace]
        for number, lease in enumerate(mine, 1):
            if reads.get(lease.token) is lease:
                self._endings.release_shards(lease, list(lease.shards), vouched=False)
            if number % RELEASES_IN_A_STEP == 0:
                await asyncio.sleep(0)


def sum_counters(parts: list[Counters]) -> Counters:
    """The sum of several tenants' counters."""
    total = Counters()
    for part in parts:
        total.asked += part.asked
        total.pending += part.pending
        total.missed += part.missed
        total.committed += part.committed
        total.declined += part.declined
        total.evicted += part.evicted
        total.bad += part.bad
        for tier, count in part.hits.items():
            total.hits[tier] += count
    return total
