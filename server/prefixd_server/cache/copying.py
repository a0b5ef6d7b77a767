"""The bytes of a transfer: whole extents from slots of one tier to slots of another, verified by movers.

Who leases the source, reserves the target and publishes the copies is the transfer's business
(transfers.py, hbm_transfers.py); nothing here changes the catalog but for copies found bad.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.errors import LimitReached
from prefixd_server.base.types import Checksums, Slots, Tier
from prefixd_server.base.work import Errand, Urgency
from prefixd_server.cache.bad_copies import BadCopies
from prefixd_server.cache.governor import Governors
from prefixd_server.cache.state import State
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.media.medium import Medium
from prefixd_server.media.movers import CopyJob, CopyResult

IO_BYTES_MAX = 8 << 20
"""Bytes of one read or write: long enough for the disk's speed, short enough for the next in the queue."""
BACKGROUND_IO_BYTES_MAX = IO_BYTES_MAX // 2
"""Of one in the background: demand that comes meanwhile waits for it."""
PIECES_AT_MOVERS_MAX = 16
"""Of one copy: more than work at a time. Scattered slots are a piece each, and would fill the queue."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks of one space on their way from slots of one tier to slots of another; checksums are copies."""

    namespace: Namespace
    shard: int
    kv_group: int
    source: Tier
    source_slots: Slots
    target: Tier
    target_slots: Slots
    checksums: Checksums


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """What became of a batch, a flag a block. Neither good nor lost: not tried, or below such."""

    good: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    """Its bytes did not match their checksum."""
    unreadable: NDArray[np.bool_]
    """The source's medium could not read it."""
    faults: tuple[OSError, ...]
    """What the source's medium raised, one per extent; also where a second attempt has read all of it."""
    tried_count: int
    """Blocks that neither the link's governor gave up nor the movers refused."""

    @property
    def lost(self) -> NDArray[np.bool_]:
        """The source's copy is of no use."""
        return self.bad | self.unreadable


class Copier:
    """See the module."""

    def __init__(self, state: State, bad_copies: BadCopies, governors: Governors) -> None:
        self._state = state
        self._bad_copies = bad_copies
        self._governors = governors

    async def copy(self, batch: Batch, errand: Errand) -> Copied:
        """Has movers copy and verify the batch, when the link's governor lets them.

        What the movers have no room for is left out, as what the governor gives up. Raises FAULTS, once
        nothing of the batch is under way any more.
        """
        began_at = self._state.clock.now()
        good, bad, unreadable = np.zeros((3, len(batch.source_slots)), dtype=np.bool_)
        faults = []
        tried_count = 0
        urgent = errand.urgency is Urgency.DEMAND
        spans = self._spans(batch, IO_BYTES_MAX if urgent else BACKGROUND_IO_BYTES_MAX)
        places = asyncio.Semaphore(PIECES_AT_MOVERS_MAX)
        results = await asyncio.gather(
            *(self._copy_span(batch, errand, places, first, end) for first, end in spans),
            return_exceptions=True,
        )
        for (first, end), result in zip(spans, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            if result is None:
                continue
            tried_count += end - first
            good[first:end], bad[first:end] = ~result.bad, result.bad
            if result.unread_from is not None:
                good[first + result.unread_from : end] = False
                unreadable[first + result.unread_from] = True
            if result.fault is not None:
                faults.append(result.fault)
        copied = Copied(good, bad, unreadable, tuple(faults), tried_count)
        if batch.source is Tier.DRAM:
            self.forget_lost(batch, copied)
        good_bytes = int(good.sum()) * batch.namespace.spec.kv_groups[batch.kv_group].block_bytes
        seconds = self._state.clock.now() - began_at
        self._state.metrics.crossed(batch.source, batch.target, seconds, good_bytes)
        return copied

    async def _copy_span(
        self, batch: Batch, errand: Errand, places: asyncio.Semaphore, first: int, end: int
    ) -> CopyResult | None:
        """One piece; None when the governor gave it up, or the movers are busy."""
        job = self._job(batch, first, end)
        governor = self._governors.get(frozenset((batch.source, batch.target)))
        if governor is None:
            return await self._run(batch, job, places)
        async with governor.turn(errand, (end - first) * job.stride_bytes, batch.source.name) as granted:
            return await self._run(batch, job, places) if granted else None

    async def _run(self, batch: Batch, job: CopyJob, places: asyncio.Semaphore) -> CopyResult | None:
        async with places:
            try:
                return await self._state.movers_of(batch.source, batch.target).run(job)
            except LimitReached as refusal:
                log.debug("a piece of a copy was refused", blocks=len(job.checksums), reason=str(refusal))
                return None

    def _spans(self, batch: Batch, bytes_max: int) -> list[tuple[int, int]]:
        """Pieces of the batch that are consecutive on both sides, of at most `bytes_max`."""
        tables = self._state.catalog.slots
        count = len(batch.source_slots)
        breaks = np.zeros(count, dtype=np.bool_)
        for tier, slots in ((batch.source, batch.source_slots), (batch.target, batch.target_slots)):
            stride = np.uint32(tables[tier].stride)
            breaks[1:] |= (slots[1:] != slots[:-1] + np.uint32(1)) | (slots[1:] % stride == 0)
        longest = max(1, bytes_max // tables[batch.source].slot_bytes_of(int(batch.source_slots[0])))
        edges = [0, *np.flatnonzero(breaks).tolist(), count]
        return [
            (at, min(at + longest, end))
            for first, end in pairwise(edges)
            for at in range(first, end, longest)
        ]

    def _job(self, batch: Batch, first: int, end: int) -> CopyJob:
        source, source_segment, source_offset = self._place(batch.source, int(batch.source_slots[first]))
        target, target_segment, target_offset = self._place(batch.target, int(batch.target_slots[first]))
        spec = batch.namespace.spec
        return CopyJob(
            source=source,
            source_segment_index=source_segment,
            source_offset_bytes=source_offset,
            target=target,
            target_segment_index=target_segment,
            target_offset_bytes=target_offset,
            stride_bytes=spec.kv_groups[batch.kv_group].slot_bytes,
            block_bytes=spec.kv_groups[batch.kv_group].block_bytes,
            checksums=batch.checksums[first:end],
            algorithm=spec.checksum_algorithm,
        )

    def _place(self, tier: Tier, slot: int) -> tuple[Medium, int, int]:
        table = self._state.catalog.slots[tier]
        segment, position = divmod(slot, table.stride)
        return self._state.media[tier], segment, position * table.slot_bytes_of(slot)

    def forget_lost(self, batch: Batch, copied: Copied) -> None:
        """Copies of no use are forgotten, deepest first: each takes what hangs below."""
        for slot in batch.source_slots[copied.lost][::-1].tolist():
            self._bad_copies.found(batch.namespace.tenant, batch.source, slot)
