"""The portable path: whole blocks through the daemon, for remote clients and for people.

The same admission, commit and visibility as the shared-memory path; here the
daemon is the writer and the reader, so a mover copies and verifies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from itertools import islice

import numpy as np

from prefixd_server.base.errors import InvalidRequest, StateConflict
from prefixd_server.base.types import (
    Checksums,
    DeclineReason,
    Hashes,
    NamespaceRef,
    ReserveOutcome,
    Slots,
    Tier,
)
from prefixd_server.cache.admitted import Admitted
from prefixd_server.cache.bad_copies import BadCopies
from prefixd_server.cache.reading import Found, Reading
from prefixd_server.cache.state import State
from prefixd_server.cache.verifying import Verifier
from prefixd_server.cache.workload import Workload
from prefixd_server.cache.writing import Writing
from prefixd_server.catalog.events import CopiesLeased, CopiesReleased, WriterFailed
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.media.movers import FillJob


class PutStream:
    """Takes the blocks of one run, one by one, in order."""

    def __init__(
        self,
        state: State,
        writing: Writing,
        namespace: Namespace,
        shard: int,
        kv_group: int,
        parent: Hashes | None,
    ) -> None:
        self._state = state
        self._writing = writing
        self._namespace = namespace
        self._shard = shard
        self._kv_group = kv_group
        self._parent = parent
        self._stored = 0
        self._present = 0
        self._declined = 0
        self._reason: DeclineReason | None = None

    async def add(self, key: Hashes, checksum: int, data: bytes | bytearray | memoryview) -> ReserveOutcome:
        """Stores one whole block of exactly block_bytes.

        Args:
            key: shape (1, 4).
            checksum: over `data`, as the sender computed it.

        Raises:
            InvalidRequest: CHECKSUM_MISMATCH; the block is not stored.
        """
        self._state.refuse_when_draining()
        self._state.catalog.namespaces.get(self._namespace.tenant, self._namespace.ref)
        admitted = self._writing.admit(self._namespace, self._shard, self._kv_group, self._parent, key)
        self._parent = key
        if len(admitted.known):
            self._present += 1
            return admitted.outcomes()[0][0]
        if admitted.declined_count:
            return self._decline(admitted)
        await self._store(admitted.slots, checksum, data)
        return ReserveOutcome.RESERVED

    def finish(self) -> tuple[int, int, int, DeclineReason | None]:
        """(stored, present, declined, why declined)."""
        return self._stored, self._present, self._declined, self._reason

    def _decline(self, admitted: Admitted) -> ReserveOutcome:
        self._declined += 1
        self._reason = admitted.reason
        self._state.counters_of(self._namespace.tenant).declined += 1
        return ReserveOutcome.DECLINED

    async def _store(self, slots: Slots, checksum: int, data: bytes | bytearray | memoryview) -> None:
        expected = np.array([checksum], dtype=np.uint64)
        filling = asyncio.ensure_future(self._fill(slots, expected, data))
        # Cancelling the caller cancels its wait, never the copy: the slot is settled either way.
        filling.add_done_callback(lambda task: self._settle(task, slots, expected))
        good = await asyncio.shield(filling)
        if not good:
            raise InvalidRequest(
                "CHECKSUM_MISMATCH",
                "the block's bytes do not match its checksum; send XXH3_64 (seed 0) over the whole block",
                field="block.checksum",
                value=checksum,
            )
        self._stored += 1

    async def _fill(self, slots: Slots, expected: Checksums, data: bytes | bytearray | memoryview) -> bool:
        table = self._state.catalog.slots[Tier.DRAM]
        (extent,) = table.extents(slots, None)
        result = await self._state.movers.run(
            FillJob(
                target=self._state.dram,
                segment_index=table.segment_of(int(slots[0])),
                offset_bytes=extent.offset_bytes,
                data=memoryview(data),
                checksum=int(expected[0]),
                algorithm=self._namespace.spec.checksum_algorithm,
            )
        )
        return not bool(result.bad[0])

    def _settle(self, task: asyncio.Task[bool], slots: Slots, checksums: Checksums) -> None:
        if not task.cancelled() and task.exception() is None and task.result():
            self._writing.publish(self._namespace.tenant, slots, checksums)
        else:
            self._state.apply(WriterFailed(Tier.DRAM, slots, quarantine=False))


class GetStream:
    """Hands out the blocks of a hit prefix, verified, while holding them for a reader that goes on reading.

    Attributes:
        expires_at: monotonic seconds; if the reader has taken nothing more by then, they are let go. Never
            while the daemon is at work for it.
    """

    def __init__(
        self,
        state: State,
        bad_copies: BadCopies,
        verifier: Verifier,
        namespace: Namespace,
        kv_group: int,
        slots: Slots,
        open_streams: set[GetStream],
    ) -> None:
        self._state = state
        self._bad_copies = bad_copies
        self._verifier = verifier
        self._namespace = namespace
        self._kv_group = kv_group
        self._slots = slots
        self._open_streams = open_streams
        self.expires_at = math.inf
        self._state.apply(CopiesLeased(Tier.DRAM, slots))
        open_streams.add(self)

    @property
    def hit_count(self) -> int:
        """Blocks of the leading hit; the iteration ends earlier at a block found bad."""
        return len(self._slots)

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return self._namespace.spec.kv_groups[self._kv_group].block_bytes

    async def __aiter__(self) -> AsyncIterator[tuple[int, int, memoryview]]:
        """(index in the run, checksum, bytes) of each block; the bytes are valid until the next step.

        Raises:
            StateConflict: GET_EXPIRED.
        """
        spec = self._namespace.spec
        table = self._state.catalog.slots[Tier.DRAM]
        for index, slot in enumerate(self._slots.tolist()):
            self._hold_until(math.inf)
            row = int(table.row[slot])
            if row < 0:
                return
            checksum = int(self._state.catalog.columns.checksum[row])
            if not await self._verifier.is_good(spec, self._kv_group, Tier.DRAM, slot):
                self._bad_copies.found(self._namespace.tenant, Tier.DRAM, slot)
                return
            (extent,) = table.extents(self._slots[index : index + 1], None)
            segment = table.segment_of(slot)
            view = self._state.dram.view(segment, extent.offset_bytes, self.block_bytes)
            yield index, checksum, view

    def await_reader(self) -> None:
        """A message is the reader's to take: it has a lease's longest life for it.

        Raises:
            StateConflict: GET_EXPIRED, it has had that for the message before, and the blocks were let go.
        """
        self._hold_until(self._state.clock.now() + self._state.limits.ttl_max_s)

    def _hold_until(self, expires_at: float) -> None:
        if self not in self._open_streams:
            limit = self._state.limits.ttl_max_s
            raise StateConflict(
                "GET_EXPIRED",
                f"nothing of this Get was read for {limit:g} s (leases.ttl_max_s), so its blocks were let "
                "go; read its messages as they come, and ask again for the blocks that are missing",
                limit=limit,
            )
        self.expires_at = expires_at

    def close(self) -> None:
        """Lets go of the blocks. Idempotent."""
        if self in self._open_streams:
            self._open_streams.remove(self)
            self._state.apply(CopiesReleased(Tier.DRAM, self._slots))


class Portable:
    """Opens the streams."""

    def __init__(
        self,
        state: State,
        reading: Reading,
        writing: Writing,
        verifier: Verifier,
        bad_copies: BadCopies,
        workload: Workload,
    ) -> None:
        self._workload = workload
        self._bad_copies = bad_copies
        self._state = state
        self._reading = reading
        self._writing = writing
        self._verifier = verifier
        self._open_gets: set[GetStream] = set()

    def begin_put(
        self, tenant: str, ref: NamespaceRef, shard: int, kv_group: int, parent: Hashes | None
    ) -> PutStream:
        """A stream that stores blocks below `parent` (None: the root)."""
        self._state.refuse_when_draining()
        namespace = self._state.catalog.namespaces.get(tenant, ref)
        return PutStream(self._state, self._writing, namespace, shard, kv_group, parent)

    def begin_get(
        self, tenant: str, ref: NamespaceRef, shard: int, kv_group: int, hashes: Hashes
    ) -> GetStream:
        """A stream of the longest resident prefix of one shard and KV group; counts one use."""
        self._state.refuse_when_draining()
        namespace = self._state.catalog.namespaces.get(tenant, ref)
        found: Found = self._reading.find_one(namespace, shard, kv_group, hashes)
        self._reading.count(tenant, found.run(len(hashes)))
        part = (shard, kv_group)
        self._workload.used_part(namespace, part, hashes, found.rows[part])
        rows = found.rows[part][: found.hit_count]
        slots = self._state.catalog.columns.slot[Tier.DRAM][rows]
        return GetStream(
            self._state, self._bad_copies, self._verifier, namespace, kv_group, slots, self._open_gets
        )

    def expire(self, now: float, count_max: int) -> int:
        """Lets go of what Gets hold whose readers have stopped reading, at most so many; how many."""
        late = list(islice((stream for stream in self._open_gets if stream.expires_at <= now), count_max))
        for stream in late:
            stream.close()
        return len(late)
