"""The NVMe tier's life: its slots and its index records. Faults and pauses are nvme_health.py's.

Order of a write: bytes, flush, index record, visible (transfers.py). Order of a
delete: index record, then space: a dropped copy's slot is FREE only when its
record is durably gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import structlog

from prefixd_server.base.accounts import Fault, TierStats
from prefixd_server.base.errors import PrefixdError
from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.types import Slots, Tier
from prefixd_server.cache.nvme_health import NvmeHealth
from prefixd_server.cache.room import Room
from prefixd_server.cache.state import State
from prefixd_server.cache.worth import AT_ANY_PRICE, Parts
from prefixd_server.cache.write_budget import WriteBudget
from prefixd_server.catalog.events import RecordsDeleted
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.catalog.reads import Departure
from prefixd_server.catalog.segments import NO_POOL
from prefixd_server.index.process import Index
from prefixd_server.index.records import (
    Keys,
    NamespaceRecord,
    Records,
    block_keys,
    keys_of,
    new_records,
    space_identity,
)
from prefixd_server.media.movers import CallJob
from prefixd_server.media.nvme import NvmeMedium

DEPARTURE_INTERVAL_S = 0.05
EVICTION_SLACK_COUNT = 64
"""Slots freed beyond what one demotion needs: index records go in groups."""
DELETE_COUNT_MAX = 8192
"""Records deleted in one commit: well within what may wait for the index."""

log = structlog.get_logger(__name__)


class NvmeTier:
    """See the module. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        room: Room,
        medium: NvmeMedium,
        index: Index,
        budget: WriteBudget,
        health: NvmeHealth,
        block_count_max: int,
    ) -> None:
        self._state = state
        self._room = room
        self.medium = medium
        self.index = index
        self.budget = budget
        self.health = health
        self.block_count_max = block_count_max
        """Records that the disk space kept for the index is enough for."""
        self._recorded: set[tuple[str, bytes, int]] = set()
        """Namespaces whose record is durable: the present index process has it from us."""
        self._recorded_by = 0
        """How often the index had been started again by then."""
        self._disowned: list[tuple[Keys, Slots]] = []
        self._recording = asyncio.Lock()
        """Held to change blocks' records: a put and a delete of one key come in the order of their causes."""
        self._assigning = asyncio.Lock()
        self.written_bytes = 0
        self.read_bytes = 0

    # -- slots ---------------------------------------------------------------------------------

    async def allocate(self, pool: int, parts: Parts, count_max: int) -> Slots:
        """Up to `count_max` RESERVED slots for the leading parts, at the cost of what is worth less.

        Raises OSError, IndexUnavailable.
        """
        table = self._state.catalog.slots[Tier.NVME]
        count = min(count_max, sum(part for part, _ in parts))
        while table.free_count(pool) < count and await self._assign(pool, count):
            pass
        if count > min(table.free_count(pool), self._record_room()):
            self._make_room(pool, parts, count)
            await self.flush_departures()
        return table.allocate(pool, min(count, self._record_room()))

    def _record_room(self) -> int:
        """How many more slots may have an index record."""
        counts = self._state.catalog.slots[Tier.NVME].counts()
        return max(0, self.block_count_max - counts.reserved - counts.resident)

    def _make_room(self, pool: int, parts: Parts, left: int) -> None:
        """Evicts for one part after the other, `left` blocks in all, until what remains is worth more."""
        free = min(self._state.catalog.slots[Tier.NVME].free_count(pool), self._record_room())
        for part, worth in parts:
            count = min(part, left)
            left -= count
            free -= count
            if free < 0:
                # To be compared with what comes next, nothing is freed beyond need.
                slack = EVICTION_SLACK_COUNT if worth == AT_ANY_PRICE else 0
                free += self._room.evict(Tier.NVME, pool, slack - free, worth)
                if free < 0:
                    return

    async def _assign(self, pool: int, count: int) -> bool:
        """Gives the pool a segment that nobody uses; its generation is raised, durably, first.

        One at a time: raised for two, a segment would outdate what the first has recorded there. Whoever
        waited meanwhile may find `count` slots free.
        """
        table = self._state.catalog.slots[Tier.NVME]
        async with self._assigning:
            if table.free_count(pool) >= count:
                return True
            segment = self._unused(pool)
            if segment is None:
                return False
            if table.pool_of(segment) != NO_POOL:
                # Before the generation is raised: should that fail, the former pool must not go on in it.
                table.unassign(segment)
            slot_bytes = self._state.catalog.namespaces.pool_of(pool).slot_bytes
            generation = await self._state.movers_of(Tier.NVME).run(
                CallJob(partial(self.medium.raise_generation, segment, slot_bytes))
            )
            table.assign(segment, pool, slot_bytes, segment, generation)
            return True

    def _unused(self, pool: int) -> int | None:
        """A segment for the pool: one that serves nobody, else an empty one of another pool's."""
        catalog = self._state.catalog
        names, table = catalog.namespaces, catalog.slots[Tier.NVME]
        donors: Iterable[int] = range(names.pool_count)
        if self._state.quotas.may_grow(catalog, Tier.NVME, pool):
            present = set(self.medium.present())
            spare = next((segment for segment in table.unassigned() if segment in present), None)
            if spare is not None:
                return spare
        else:
            # At its quota, a tenant's pools can have segments of one another alone.
            donors = names.pools_of_tenant(names.pool_of(pool).tenant)
        empty = (table.empty_of(donor) for donor in donors if donor != pool)
        return next((segment for segment in empty if segment is not None), None)

    # -- records -------------------------------------------------------------------------------

    def records(
        self, namespace: Namespace, shard: int, kv_group: int, rows: np.ndarray, slots: Slots
    ) -> Records:
        """Unsealed records of blocks of one space in these slots."""
        columns, table = self._state.catalog.columns, self._state.catalog.slots[Tier.NVME]
        identity = self.identity(namespace, shard, kv_group)
        records = new_records(identity, columns.key[rows], self.medium.store_uuid)
        segments = (slots // np.uint32(table.stride)).astype(np.int64)
        records["block_bytes"] = namespace.spec.kv_groups[kv_group].block_bytes
        records["segment"] = segments
        records["slot"] = slots % np.uint32(table.stride)
        records["generation"] = self.medium.generations[segments]
        records["checksum"] = columns.checksum[rows]
        records["depth"] = columns.depth[rows]
        parents = columns.parent[rows]
        records["parent"] = np.where((parents >= 0)[:, None], columns.key[parents], 0)
        age = self._state.clock.now() - self._state.catalog.tree.last_use[columns.node[rows]]
        records["last_use"] = self._state.clock.wall() - age
        return records

    def identity(self, namespace: Namespace, shard: int, kv_group: int) -> bytes:
        """The space's identity in the index."""
        ref = namespace.ref
        return space_identity(namespace.tenant, ref.fingerprint, ref.epoch, shard, kv_group)

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        """The turn to put() records, behind the deletes of all that has departed or was disowned.

        What was put is to be published or disowned before anything else is awaited: whoever comes next
        may have the same blocks in other slots, and the delete of ours must not come behind their put.
        Raises IndexUnavailable, LimitReached.
        """
        async with self._recording:
            await self._delete_departed()
            yield

    async def put(self, namespace: Namespace, records: Records) -> None:
        """Makes records durable, their namespace's first. Within recording()."""
        ref = namespace.ref
        name = (namespace.tenant, ref.fingerprint, ref.epoch)
        owners = []
        if self.index.counters.restarts != self._recorded_by:
            # What opened the database again may have found an empty one.
            self._recorded.clear()
            self._recorded_by = self.index.counters.restarts
        if name not in self._recorded:
            owners = [
                NamespaceRecord(
                    namespace.tenant, ref.fingerprint, ref.epoch, namespace.spec, namespace.opened_at
                )
            ]
        await self.index.commit(puts=records, namespaces=owners)
        self._recorded.add(name)

    def disown(self, records: Records, slots: Slots) -> None:
        """RESERVED slots of no block, whose records may be durable: free once these are deleted."""
        self._disowned.append((keys_of(records), slots))

    async def delete(self, keys: Keys) -> None:
        """Deletes records, durably, as many at a time as the index's queue takes."""
        for first in range(0, len(keys), DELETE_COUNT_MAX):
            await self.index.commit(deletes=keys[first : first + DELETE_COUNT_MAX])

    async def forget(self, namespaces: list[bytes]) -> None:
        """Deletes namespaces' records by their keys, durably, as delete() does. put() makes them again."""
        for first in range(0, len(namespaces), DELETE_COUNT_MAX):
            await self.index.commit(forgotten=namespaces[first : first + DELETE_COUNT_MAX])

    # -- departures ----------------------------------------------------------------------------

    async def flush_departures(self) -> None:
        """Deletes the records of dropped and disowned copies, durably; then their slots are free."""
        async with self._recording:
            await self._delete_departed()

    async def _delete_departed(self) -> None:
        while self.has_departures:
            taken, self._state.catalog.departures = self._state.catalog.departures, []
            disowned, self._disowned = self._disowned, []
            failpoint("departures.begun")
            keys = [self._keys(gone) for gone in taken] + [keys for keys, _ in disowned]
            try:
                await self.delete(np.concatenate(keys))
            except BaseException:
                self._state.catalog.departures = taken + self._state.catalog.departures
                self._disowned = disowned + self._disowned
                raise
            failpoint("departures.deleted")
            for gone in taken:
                self._state.apply(RecordsDeleted(gone.tier, gone.slots))
            for _, slots in disowned:
                self._state.catalog.slots[Tier.NVME].free(slots)
            failpoint("departures.freed")

    @property
    def has_departures(self) -> bool:
        """Whether slots wait for their records to be deleted."""
        return bool(self._state.catalog.departures or self._disowned)

    def _keys(self, gone: Departure) -> Keys:
        names = self._state.catalog.namespaces
        parts = []
        for space in np.unique(gone.spaces).tolist():
            namespace, shard, kv_group = names.owner(space)
            identity = self.identity(namespace, shard, kv_group)
            parts.append(block_keys(identity, gone.keys[gone.spaces == space]))
        return np.concatenate(parts)

    async def run(self) -> None:
        """Deletes what departed, again and again; ends when cancelled."""
        while True:
            await asyncio.sleep(DEPARTURE_INTERVAL_S)
            if self.has_departures and self.health.writable:
                try:
                    await self.flush_departures()
                except PrefixdError as error:
                    self.health.failed(error)

    # -- life ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends the index process and closes the files."""
        await self.index.close()
        self.medium.close()

    def _fault_counts(self) -> dict[Fault, int]:
        """Every kind, those that never happened too."""
        counts = dict.fromkeys(Fault, 0) | self.health.faults
        counts[Fault.RECORD_CORRUPT] += self.index.counters.corrupt_records
        counts[Fault.INDEX_REBUILT] += self.index.counters.rebuilds
        counts[Fault.INDEX_RESET] += self.index.counters.resets
        return counts

    def stats(self, pools: list[int]) -> TierStats:
        """What the given pools hold here."""
        return replace(
            self._state.catalog.slots[Tier.NVME].stats(Tier.NVME, pools),
            page_kind="files",
            state=self.health.state.value,
            state_reason=self.health.reason,
            fault_counts=self._fault_counts(),
        )
