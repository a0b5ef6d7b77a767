"""Brings the NVMe tier back after a start, from the index alone; DRAM serves meanwhile.

No data file is read: blocks are verified when they are first promoted. A record
counts only if its store, segment generation, place and size are right, its
namespace was not dropped, and all its ancestors are there; the others are
deleted. Works in steps, so that the loop is never held for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_ROW, Hashes, SlotState, Tier
from prefixd_server.cache.epochs import Epochs
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.state import State
from prefixd_server.catalog.columns import VISIBLE
from prefixd_server.catalog.events import BlocksRecovered
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.index.chains import chains
from prefixd_server.index.line import IndexUnavailable
from prefixd_server.index.records import Records, distinct_spaces, keys_of

Mask: TypeAlias = NDArray[np.bool_]
STEP_BLOCK_COUNT = 512
"""Blocks put into the catalog before the loop gets its turn."""
NAMESPACE_COUNT_MAX = 1 << 20
"""Recovered namespaces are not held against their tenants' limit: they were admitted before."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class RecoveryReport:
    """Records by what became of them; together all that the index had."""

    recovered: int = 0
    misplaced: int = 0
    """Of another store or generation, or not where a slot can be."""
    orphaned: int = 0
    """Without all ancestors, or of a namespace that was dropped."""
    known_already: int = 0
    """Stored again by an engine before recovery came to them."""


class Recovery:
    """See the module. run() once, after the start."""

    def __init__(self, state: State, nvme: NvmeTier, epochs: Epochs) -> None:
        self._state = state
        self._nvme = nvme
        self._epochs = epochs
        self._rng = np.random.default_rng()
        self._owners: dict[bytes, tuple[Namespace, int, int]] = {}
        self.report = RecoveryReport()

    async def run(self) -> None:
        """Recovers; begins again when the index fails on the way. Raises ConfigError when it is refused."""
        await self._nvme.index.start()
        while True:
            await self._nvme.index.ready()
            try:
                await self._recover()
            except (IndexUnavailable, OSError) as error:
                log.warning("recovery begins again", reason=str(error))
                continue
            break
        self._nvme.health.recovered()
        log.info(
            "NVMe tier recovered",
            recovered=self.report.recovered,
            misplaced=self.report.misplaced,
            orphaned=self.report.orphaned,
            known_already=self.report.known_already,
        )

    async def _recover(self) -> None:
        self.report = RecoveryReport()
        for record in await self._nvme.index.namespaces():
            current = self._epochs.fresh(record.tenant, record.fingerprint)
            if record.spec is not None and record.epoch >= current:
                namespace = self._state.catalog.namespaces.open(
                    record.tenant, record.spec, record.epoch, record.opened_at, NAMESPACE_COUNT_MAX
                )
                if namespace.ref.epoch == record.epoch:
                    for identity, (shard, group) in record.spaces().items():
                        self._owners[identity] = (namespace, shard, group)
        gone: list[Records] = []
        async for identity, records in self._by_space():
            owner = self._owners.get(identity)
            if owner is None or self._was_dropped(owner[0]):
                self.report.orphaned += len(records)
                gone.append(records)
            else:
                gone.extend(await self._recover_space(owner, records))
            failpoint("recovery.space_done")
        if any(map(len, gone)):
            await self._nvme.delete(np.concatenate([keys_of(records) for records in gone]))
            failpoint("recovery.deleted")

    def _was_dropped(self, namespace: Namespace) -> bool:
        """Whether the namespace was dropped since recovery began."""
        return namespace not in self._state.catalog.namespaces.list(namespace.tenant)

    async def _by_space(self) -> AsyncIterator[tuple[bytes, Records]]:
        """All records, one space at a time; records come in key order, so a space's are together."""
        parts: dict[bytes, list[Records]] = {}
        async for batch in self._nvme.index.load():
            for identity, where in distinct_spaces(batch):
                parts.setdefault(identity, []).append(batch[where])
        for identity in list(parts):
            yield identity, np.concatenate(parts.pop(identity))

    # -- one space -----------------------------------------------------------------------------

    async def _recover_space(self, owner: tuple[Namespace, int, int], records: Records) -> list[Records]:
        """Puts a space's blocks into the catalog; the records that are of no use are returned."""
        namespace, _, group = owner
        good = self._well_placed(namespace, group, records)
        self.report.misplaced += int((~good).sum())
        gone = [records[~good]]
        records = records[good]
        if len(records) == 0:
            return gone
        ordered = chains(records, self._rng)
        self.report.orphaned += len(ordered.orphans)
        gone.append(records[ordered.orphans])
        space = self._space(owner)
        place_of = self._assign(namespace, group, records)
        done = 0
        for number in range(len(ordered)):
            members = ordered.order[ordered.starts[number] : ordered.starts[number + 1]]
            parent = int(ordered.parents[number])
            refused = self._recover_chain(space, records, members, parent, place_of)
            if len(refused):
                gone.append(records[refused])
            done += len(members)
            if done >= STEP_BLOCK_COUNT:
                done = 0
                await asyncio.sleep(0)
                if self._was_dropped(namespace):
                    return [*gone, records]
        return gone

    def _well_placed(self, namespace: Namespace, group: int, records: Records) -> Mask:
        """Which records name a slot of this store, in its segment's present generation, each slot once."""
        medium = self._nvme.medium
        table = self._state.catalog.slots[Tier.NVME]
        what = namespace.spec.kv_groups[group]
        segments = records["segment"].astype(np.int64)
        good: Mask = segments < medium.segment_count
        known = np.where(good, segments, 0)
        good &= (records["store_uuid"] == np.frombuffer(medium.store_uuid, np.uint8)).all(axis=1)
        good &= medium.generations[known] == records["generation"]
        good &= medium.generations[known] != 0
        good &= records["block_bytes"] == what.block_bytes
        good &= records["slot"] < table.segment_bytes // what.slot_bytes
        sizes = np.zeros(medium.segment_count, dtype=np.int64)
        for segment in medium.present():
            sizes[segment] = medium.slot_bytes(segment)
        good &= sizes[known] == what.slot_bytes
        # Of two records for one slot the one that was used last is the newer; bytes are verified anyway.
        newest = np.argsort(records["last_use"], kind="stable")[::-1]
        slots = segments * table.stride + records["slot"]
        _, first = np.unique(slots[newest], return_index=True)
        chosen = np.zeros(len(records), dtype=np.bool_)
        chosen[newest[first]] = True
        good &= chosen
        return good

    def _space(self, owner: tuple[Namespace, int, int]) -> int:
        namespace, shard, group = owner
        catalog = self._state.catalog
        space = catalog.namespaces.space(namespace, shard, group)
        if space is None:
            space = catalog.namespaces.make_space(namespace, shard, group)
            pool = catalog.namespaces.pool(namespace.tenant, namespace.spec.kv_groups[group].slot_bytes)
            catalog.tree.add_space(space, pool)
        return space

    def _assign(self, namespace: Namespace, group: int, records: Records) -> NDArray[np.int64]:
        """Has the segments serve the pool; the slot of each record, -1 where the segment serves another."""
        catalog = self._state.catalog
        table = catalog.slots[Tier.NVME]
        slot_bytes = namespace.spec.kv_groups[group].slot_bytes
        pool = catalog.namespaces.pool(namespace.tenant, slot_bytes)
        segments = records["segment"].astype(np.int64)
        slots: NDArray[np.int64] = segments * table.stride + records["slot"]
        for segment in np.unique(segments).tolist():
            if table.pool_of(segment) < 0:
                generation = self._nvme.medium.generation(segment)
                table.assign(segment, pool, slot_bytes, segment, generation)
            if table.pool_of(segment) != pool:
                slots[segments == segment] = -1
        return slots

    def _recover_chain(
        self, space: int, records: Any, members: NDArray[np.int64], parent: int, slots: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Puts one chain below its parent; the members that are of no use are returned."""
        catalog = self._state.catalog
        above = NO_ROW
        if parent >= 0:
            above = int(catalog.find(space, np.ascontiguousarray(records["hash"][parent : parent + 1]))[0])
            if above == NO_ROW or not catalog.columns.flags[above] & VISIBLE:
                self.report.orphaned += len(members)
                return members
        hashes: Hashes = np.ascontiguousarray(records["hash"][members])
        found = catalog.find(space, hashes)
        known = int((found >= 0).sum())
        kept = np.zeros(0, dtype=np.bool_)
        if known:
            # What an attempt before this one has put where its record says stays there.
            kept = catalog.columns.slot[Tier.NVME][found[:known]] == slots[members[:known]]
            self.report.recovered += int(kept.sum())
            self.report.known_already += int((~kept).sum())
            above = int(found[known - 1])
            if not catalog.columns.flags[above] & VISIBLE:
                return members
        fresh = members[known:]
        # After a lost log tail, records of two spaces may name one slot: the first to come keeps it.
        places = slots[fresh]
        free = (places >= 0) & (catalog.slots[Tier.NVME].state[np.maximum(places, 0)] == SlotState.FREE)
        usable = leading(free)
        if usable:
            self._put(space, above, records, fresh[:usable], slots)
        refused: NDArray[np.int64] = np.concatenate([members[:known][~kept], fresh[usable:]])
        return refused

    def _put(
        self, space: int, above: int, records: Any, members: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> None:
        table = self._state.catalog.slots[Tier.NVME]
        chosen = slots[members].astype(np.uint32)
        for segment in np.unique(chosen // np.uint32(table.stride)).tolist():
            table.claim(chosen[chosen // np.uint32(table.stride) == segment])
        age = max(0.0, self._state.clock.wall() - float(records["last_use"][members].max()))
        self._state.apply(
            BlocksRecovered(
                space,
                above,
                np.ascontiguousarray(records["hash"][members]),
                records["checksum"][members].copy(),
                Tier.NVME,
                chosen,
                self._state.clock.now() - age,
            )
        )
        self.report.recovered += len(members)
