"""Brings the NVMe tier back after a start, from the index alone; DRAM serves meanwhile.

No data file is read: blocks are verified when they are first promoted. A record
counts only if its store, segment generation, place and size are right, its
namespace was not dropped, and all its ancestors are there; the others are
deleted. Sorting is a thread's work, and blocks go into the catalog in small
steps, so that the loop is never held for long.

Until it is over, every slot of a segment that holds blocks is RESERVED; those that
no record names are freed once the records that do not count are durably gone.
Namespaces of no block in the tier lose their record, too: each comes back with its
next block, and an engine that makes one with every update of its weights makes many.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.accounts import Fault
from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_ROW, SlotState, Tier
from prefixd_server.cache.epochs import Epochs
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.state import State
from prefixd_server.catalog.events import BlocksRecovered
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.index.line import IndexUnavailable
from prefixd_server.index.records import Keys, NamespaceRecord, block_keys, distinct_spaces, keys_of
from prefixd_server.index.sifting import Layout, Recoverable, Sieve

Owner: TypeAlias = tuple[Namespace, int, int]
"""(namespace, shard, kv_group) of a space."""
STEP_BLOCK_COUNT = 1024
STEP_CHAIN_COUNT = 16
"""What is put into the catalog before the loop gets its turn: about a millisecond."""
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
    """Without all ancestors, of a namespace that was dropped, or beyond what the catalog can hold."""
    known_already: int = 0
    """Stored again by an engine before recovery came to them."""
    faults: Counter[Fault] = field(default_factory=Counter)
    """Those that are misplaced, by what was wrong."""
    namespaces_forgotten: int = 0
    """Records of namespaces, not of blocks."""


class Recovery:
    """See the module. run() once, after the start."""

    def __init__(self, state: State, nvme: NvmeTier, epochs: Epochs) -> None:
        self._state = state
        self._nvme = nvme
        self._epochs = epochs
        self._rng = np.random.default_rng()
        self._owners: dict[bytes, Owner] = {}
        self._names: dict[bytes, Namespace | None] = {}
        """Keys of the namespaces' records that can be forgotten, and which namespace was opened by each."""
        self._filled: set[int] = set()
        """Numbers of the namespaces that have a block in the tier."""
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
        self.report.faults[Fault.RECORD_ORPHANED] += self.report.orphaned
        self._nvme.health.recovered(self.report.faults)
        log.info(
            "NVMe tier recovered",
            recovered=self.report.recovered,
            misplaced=self.report.misplaced,
            orphaned=self.report.orphaned,
            known_already=self.report.known_already,
            namespaces_forgotten=self.report.namespaces_forgotten,
        )

    async def _recover(self) -> None:
        self.report = RecoveryReport()
        await self._open_namespaces()
        gone: list[Keys] = []
        sieves = await self._load(gone)
        for identity in list(sieves):
            blocks = await asyncio.to_thread(sieves.pop(identity).sorted, self._rng)
            gone += [blocks.misplaced, blocks.orphaned]
            self.report.misplaced += len(blocks.misplaced)
            self.report.orphaned += len(blocks.orphaned)
            self.report.faults += blocks.faults
            refused = await self._recover_space(self._owners[identity], blocks)
            gone.append(block_keys(identity, blocks.hashes[refused]))
            failpoint("recovery.space_done")
        if any(map(len, gone)):
            await self._nvme.delete(np.concatenate(gone))
            failpoint("recovery.deleted")
        await self._forget_namespaces()
        failpoint("recovery.forgotten")
        await self._free_the_rest()
        failpoint("recovery.freed")

    async def _open_namespaces(self) -> None:
        self._names.clear()
        self._filled.clear()
        async for records in self._nvme.index.namespaces():
            for record in records:
                self._open_namespace(record)
                await asyncio.sleep(0)

    def _open_namespace(self, record: NamespaceRecord) -> None:
        current = self._epochs.fresh(record.tenant, record.fingerprint)
        owner = None
        if record.spec is not None and record.epoch >= current:
            namespace = self._state.catalog.namespaces.open(
                record.tenant, record.spec, record.epoch, record.opened_at, NAMESPACE_COUNT_MAX
            )
            if namespace.ref.epoch == record.epoch:
                owner = namespace
                for identity, (shard, group) in record.spaces().items():
                    self._owners[identity] = (namespace, shard, group)
        # Where the drop that led to its epoch could not be saved, the record alone tells of it.
        if record.epoch <= current:
            self._names[record.key()] = owner

    async def _forget_namespaces(self) -> None:
        """Deletes the records of namespaces without a block; nobody writes any here yet."""
        keys = [
            key for key, owner in self._names.items() if owner is None or owner.number not in self._filled
        ]
        await self._nvme.forget(keys)
        self.report.namespaces_forgotten = len(keys)

    async def _load(self, gone: list[Keys]) -> dict[bytes, Sieve]:
        """All records, by the identity of their space; the keys of those of no living space go to `gone`."""
        layout = self._layout()
        sieves: dict[bytes, Sieve] = {}
        async for batch in self._nvme.index.load():
            for identity, where in distinct_spaces(batch):
                sieve = sieves.get(identity) or self._sieve(identity, layout)
                if sieve is None:
                    gone.append(keys_of(batch[where]))
                    self.report.orphaned += where.stop - where.start
                else:
                    sieves[identity] = sieve
                    sieve.add(batch[where])
        failpoint("recovery.loaded")
        return sieves

    def _sieve(self, identity: bytes, layout: Layout) -> Sieve | None:
        owner = self._owners.get(identity)
        if owner is None or self._was_dropped(owner[0]):
            return None
        what = owner[0].spec.kv_groups[owner[2]]
        return Sieve(layout, identity, what.block_bytes, what.slot_bytes)

    def _layout(self) -> Layout:
        medium, table = self._nvme.medium, self._state.catalog.slots[Tier.NVME]
        slot_bytes = np.zeros(medium.segment_count, dtype=np.int64)
        for segment in medium.present():
            slot_bytes[segment] = medium.slot_bytes(segment)
        return Layout(
            medium.store_uuid,
            medium.generations.copy(),
            slot_bytes,
            table.segment_bytes,
            table.stride,
            damaged=frozenset(medium.report.damaged),
            missing=frozenset([*medium.report.made, *medium.report.absent]),
        )

    def _was_dropped(self, namespace: Namespace) -> bool:
        """Whether the namespace was dropped since recovery began."""
        return not self._state.catalog.namespaces.is_open(namespace)

    # -- one space -----------------------------------------------------------------------------

    async def _recover_space(self, owner: Owner, blocks: Recoverable) -> NDArray[np.bool_]:
        """Puts a space's blocks into the catalog, step by step; which were refused."""
        refused = np.zeros(len(blocks.hashes), dtype=np.bool_)
        if not len(blocks) or self._was_dropped(owner[0]):
            self.report.orphaned += len(refused)
            return ~refused
        space = self._space(owner)
        slots = await self._adopt(owner, blocks)
        filling = _Filling(self._state, space, blocks, slots, refused, self.report)
        for first, end in _steps(blocks):
            if self._was_dropped(owner[0]):
                return np.ones(len(refused), dtype=np.bool_)
            filling.put(first, end)
            failpoint("recovery.step")
            await asyncio.sleep(0)
        if not refused.all():
            self._filled.add(owner[0].number)
        return refused

    def _space(self, owner: Owner) -> int:
        namespace, shard, group = owner
        catalog = self._state.catalog
        space = catalog.namespaces.space(namespace, shard, group)
        if space is None:
            space = catalog.namespaces.make_space(namespace, shard, group)
            pool = catalog.namespaces.pool(namespace.tenant, namespace.spec.kv_groups[group].slot_bytes)
            catalog.tree.add_space(space, pool)
        return space

    async def _adopt(self, owner: Owner, blocks: Recoverable) -> NDArray[np.int64]:
        """Has the segments serve the pool; the slot of each block, -1 where the segment serves another."""
        table = self._state.catalog.slots[Tier.NVME]
        slot_bytes = owner[0].spec.kv_groups[owner[2]].slot_bytes
        pool = self._state.catalog.namespaces.pool(owner[0].tenant, slot_bytes)
        foreign = []
        for segment in blocks.segments:
            if table.pool_of(segment) < 0:
                table.adopt(segment, pool, slot_bytes, segment, self._nvme.medium.generation(segment))
                await asyncio.sleep(0)
            if table.pool_of(segment) != pool:
                foreign.append(segment)
        if not foreign:
            return blocks.slots
        return np.where(np.isin(blocks.slots // table.stride, foreign), -1, blocks.slots)

    async def _free_the_rest(self) -> None:
        """Slots that no block was found in. Nobody else has any: nothing is written here yet."""
        table = self._state.catalog.slots[Tier.NVME]
        for segment in range(table.segment_count):
            where = table.slots_in(segment)
            empty = (table.state[where] == SlotState.RESERVED) & (table.row[where] == NO_ROW)
            slots = (np.flatnonzero(empty) + where.start).astype(np.uint32)
            for first in range(0, len(slots), STEP_BLOCK_COUNT):
                table.free(slots[first : first + STEP_BLOCK_COUNT])
                await asyncio.sleep(0)


def _steps(blocks: Recoverable) -> Iterator[tuple[int, int]]:
    """The chains as [first, end) of one step each."""
    starts = blocks.starts.tolist()
    first = 0
    for end in range(1, len(starts)):
        full = end - first >= STEP_CHAIN_COUNT or starts[end] - starts[first] >= STEP_BLOCK_COUNT
        if full or end == len(starts) - 1:
            yield first, end
            first = end


class _Filling:
    """Puts the chains of one space into the catalog.

    Args:
        slots: of the blocks; -1 for none.
        refused: set where a block was of no use.
    """

    def __init__(
        self,
        state: State,
        space: int,
        blocks: Recoverable,
        slots: NDArray[np.int64],
        refused: NDArray[np.bool_],
        report: RecoveryReport,
    ) -> None:
        self._state = state
        self._space = space
        self._blocks = blocks
        self._slots = slots
        self._refused = refused
        self._report = report

    def put(self, first: int, end: int) -> None:
        """Chains [first, end): all in one event, unless one of them meets what is there already."""
        blocks, catalog = self._blocks, self._state.catalog
        start, stop = int(blocks.starts[first]), int(blocks.starts[end])
        parents = blocks.parents[first:end]
        outside = (parents >= 0) & (parents < start)
        above = np.full(end - first, NO_ROW, dtype=np.int32)
        above[outside] = catalog.find(self._space, blocks.hashes[parents[outside]])
        known = catalog.find(self._space, blocks.hashes[start:stop])
        fresh = (known < 0).all() and self._vacant(start, stop).all()
        if fresh and catalog.visible(above[outside]).all() and self._fit(stop - start) == stop - start:
            inside = np.where(parents >= start, parents - start, -1)
            edges = (blocks.starts[first : end + 1] - start).tolist()
            self._apply(start, stop, edges, above.tolist(), inside.tolist(), blocks.last_use[first:end])
            return
        for chain in range(first, end):
            self._put_chain(chain)

    def _put_chain(self, chain: int) -> None:
        """One chain, whatever of it is known already."""
        blocks, catalog = self._blocks, self._state.catalog
        start, stop = int(blocks.starts[chain]), int(blocks.starts[chain + 1])
        parent, above = int(blocks.parents[chain]), NO_ROW
        if parent >= 0:
            row = catalog.find(self._space, blocks.hashes[parent : parent + 1])
            if not catalog.visible(row)[0]:
                self._refuse(start, stop)
                return
            above = int(row[0])
        found = catalog.find(self._space, blocks.hashes[start:stop])
        known = leading(found >= 0)
        if known:
            # What an attempt before this one has put where its record says stays there.
            kept = catalog.columns.slot[Tier.NVME][found[:known]] == self._slots[start : start + known]
            self._report.recovered += int(kept.sum())
            self._report.known_already += int((~kept).sum())
            self._refused[start : start + known] = ~kept
            above = int(found[known - 1])
            if not catalog.visible(found[known - 1 : known])[0]:
                self._refuse(start + known, stop)
                return
        # After a lost log tail, records of two spaces may name one slot: the first to come keeps it.
        usable = self._fit(leading(self._vacant(start + known, stop)))
        end = start + known + usable
        if usable:
            self._apply(start + known, end, [0, usable], [above], [-1], blocks.last_use[chain : chain + 1])
        self._refuse(end, stop)

    def _vacant(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the blocks' slots are still to be given to a block."""
        table, slots = self._state.catalog.slots[Tier.NVME], self._slots[start:stop]
        vacant: NDArray[np.bool_] = table.state.take(slots, mode="clip") == SlotState.RESERVED
        vacant &= (table.row.take(slots, mode="clip") == NO_ROW) & (slots >= 0)
        return vacant

    def _fit(self, count: int) -> int:
        """How many of so many blocks the catalog has room for."""
        columns = self._state.catalog.columns
        return min(count, columns.row_count_max - columns.count)

    def _refuse(self, start: int, stop: int) -> None:
        self._refused[start:stop] = True
        self._report.orphaned += stop - start

    def _apply(
        self,
        start: int,
        stop: int,
        edges: list[int],
        above: list[int],
        inside: list[int],
        last_use: NDArray[np.float64],
    ) -> None:
        clock, blocks = self._state.clock, self._blocks
        ages = np.maximum(0.0, clock.wall() - last_use)
        self._state.apply(
            BlocksRecovered(
                self._space,
                edges,
                above,
                inside,
                blocks.hashes[start:stop],
                blocks.checksums[start:stop],
                Tier.NVME,
                self._slots[start:stop].astype(np.uint32),
                (clock.now() - ages).tolist(),
            )
        )
        self._report.recovered += stop - start
