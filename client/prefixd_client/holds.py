"""Leases as a process holds them: the copies between segments and the engine's memory.

The sync and the async leases (leases.py, async_leases.py) add only how one waits.

A lease stops by itself: after 80 % of its life unless it was renewed, with its session, and when it is
released. A read that stops is a shorter hit; a write that stops leaves its blocks uncommitted. One thread at
a time uses a lease; renewals come from another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

from prefixd.v1 import cache_service_pb2 as wire

from .calls import Grant, block_bytes_of, committed_of
from .control import Control, log
from .copy import Span
from .device_copy import Way, read_by, write_by
from .device_driver import DeviceFault
from .device_memory import device_pieces_of, is_on_device
from .errors import InvalidArgument
from .layout import BlockMemory, Pieces, pieces_of
from .namespace import NamespaceSpec
from .operations import Call, ReadGrant, WriteGrant
from .outbox import Abort
from .segments import SegmentUnknown
from .session import Session
from .values import Committed, Extent, ReserveOutcome


class Lease(ABC):
    """What read and write leases share.

    Attributes:
        token: 16 bytes; whoever of the same engine instance has it may use the lease. Empty when nothing was
            leased.
        is_held: False once it was released, aborted, handed over or committed whole, and without a token.
    """

    def __init__(self, control: Control, session: Session, spec: NamespaceSpec, grant: Grant) -> None:
        self.token = grant.token
        self.session = session
        self.is_held = bool(grant.token)
        self._control = control
        self._spec = spec
        self._until = grant.until
        if self.is_held:
            control.hold(self)

    def expired(self) -> bool:
        """Whether it must not be used any more: over its time, its session ended, its client closed."""
        return self.session.is_lost or self._control.is_closed or self._control.now() >= self._until

    def renewed(self, until: float) -> None:
        """The daemon has renewed it; for the session's thread."""
        self._until = until

    def lost(self) -> None:
        """The daemon does not know it any more; for the session's thread."""
        self._until = 0.0

    def give_up(self) -> None:
        """Ends it with its client, when nobody copies any more; for the keeper."""
        self._end(self._ending())

    @abstractmethod
    def _ending(self) -> wire.LeaseRelease | Abort:
        """What the daemon is told when this process has no more use for it."""
        ...

    def _end(self, ending: wire.LeaseRelease | Abort) -> None:
        """Has the daemon told, off the caller's way. Again does nothing."""
        if self.is_held:
            self.is_held = False
            self._control.end_lease(self.session.boot_id, ending)

    def __del__(self) -> None:
        if self.is_held:
            self._control.outbox.abandon(self.session.boot_id, self._ending())

    def _spans(
        self, extents: Sequence[Extent], first: int, last: int, block_bytes: int, way: Way
    ) -> Iterator[tuple[Span, Way]]:
        """Where the slots of blocks first to last - 1 are mapped, in order, and how they are reached.

        Ends early when a segment is gone. A span is mapped until the next is asked for.
        """
        for extent in extents:
            start, end = max(first, extent.first_block), min(last, extent.end_block)
            if start >= end:
                continue
            try:
                place = self.session.place(extent.segment_id, way.device)
            except (SegmentUnknown, DeviceFault):
                return
            except ConnectionError as error:
                self._control.session_lost(self.session, str(error))
                return
            offset = extent.offset_bytes + (start - extent.first_block) * extent.stride_bytes
            if offset + (end - start - 1) * extent.stride_bytes + block_bytes > place.length_bytes:
                return
            span = Span(place.address + offset, extent.stride_bytes, start, end - start)
            yield span, replace(way, device=place.device)

    def _way(self, memory: Sequence[BlockMemory], stream: int) -> Way:
        """How blocks in this memory travel. Raises InvalidArgument for a GPU's when there is no device."""
        on_device = bool(memory) and is_on_device(memory[0])
        device = self.session.device if on_device else None
        if on_device and device is None:
            raise InvalidArgument(
                "memory", "on a GPU", "this client has no device", "name it in ClientOptions.device_uuid"
            )
        return Way(self._spec.checksum_algorithm, device, stream, on_device)

    def _in_doubt(self, fault: DeviceFault) -> None:
        """A copy may still be under way: the daemon hears nothing, and keeps the slots until we are dead."""
        log.error("a copy on the device failed; the device is given up: %s", fault)
        self.is_held = False
        self._until = 0.0


class ReadHold(Lease):
    """A hold on the leading blocks of a run that hit.

    Attributes:
        run: hits, pending and misses of the run asked for, skipped blocks included.
        first_block: index in the run of the first block that can be loaded; those before were skipped.
        block_count: blocks that can be loaded.
    """

    def __init__(self, control: Control, spec: NamespaceSpec, granted: ReadGrant) -> None:
        super().__init__(control, granted.session, spec, granted.grant)
        self.run = granted.run
        self.first_block = granted.first_block
        self.block_count = granted.run.hit_count - granted.first_block
        self._extents = granted.extents
        self._bad: list[wire.BadBlock] = []
        self.session.prefetch({extent.segment_id for run in granted.extents.values() for extent in run})

    @property
    def hit_count(self) -> int:
        """Leading blocks of the run that hit, skipped ones included."""
        return self.run.hit_count

    def copy_out(
        self,
        targets: Sequence[BlockMemory],
        shard: int = 0,
        kv_group: int = 0,
        start: int = 0,
        stream: int = 0,
    ) -> int:
        """Copies blocks into the engine's memory and verifies them there, in order.

        Args:
            targets: memory of consecutive blocks, all on the CPU or all on the client's GPU; the first is
                block first_block + start of the run.
            shard: one that was given to acquire() or redeem().
            kv_group: index into the namespace's groups.
            start: blocks of the lease to leave out at its front.
            stream: the engine's CUDA stream for what is on a GPU; what it does later finds the blocks.

        Returns:
            Number of leading targets that hold verified blocks. What lies behind them is undefined. A bad
            block ends the copy and is reported with release().

        Raises:
            InvalidArgument: more targets than blocks, wrong sizes, a shard that was not asked for.
        """
        self._control.check_usable()
        block_bytes = block_bytes_of(self._spec, shard, kv_group)
        extents = self._extents.get((shard, kv_group))
        if extents is None:
            raise InvalidArgument(
                "shard", shard, "was not asked for", "name it in acquire(shards=...) or redeem it"
            )
        if not 0 <= start <= self.block_count - len(targets):
            raise InvalidArgument(
                "targets",
                f"{start} + {len(targets)}",
                f"this lease has {self.block_count} blocks",
                "load fewer",
            )
        way = self._way(targets, stream)
        pieces = [_pieces(way, target, block_bytes, writable=True) for target in targets]
        if not self.is_held or not pieces:
            return 0
        first = self.first_block + start
        with self.session.copying():
            good, is_bad = self._copy_verified(extents, first, pieces, block_bytes, way)
        if is_bad:
            self._bad.append(wire.BadBlock(shard=shard, kv_group=kv_group, block_index=first + good))
        self._control.statistics.add(read=good, bad=int(is_bad))
        return good

    def _copy_verified(
        self,
        extents: Sequence[Extent],
        first: int,
        pieces: Sequence[Pieces],
        block_bytes: int,
        way: Way,
    ) -> tuple[int, bool]:
        """(good leading blocks, whether the next one is bad)."""
        checksums = [
            checksum
            for extent in extents
            if extent.end_block > first
            for checksum in extent.checksums[max(0, first - extent.first_block) :]
        ]
        good = 0
        for span, own_way in self._spans(extents, first, first + len(pieces), block_bytes, way):
            end = good + span.block_count
            try:
                copied, is_bad = read_by(own_way, span, pieces[good:end], checksums[good:end], self.expired)
            except DeviceFault as fault:
                self._in_doubt(fault)
                return good, False
            good += copied
            if good < end:
                return good, is_bad
        return good, False

    def release(self, *, all_shards: bool = False) -> None:
        """Ends this process's part of the lease, off the caller's way. Releasing again does nothing.

        Args:
            all_shards: ends the lease for every process, also shards that were not asked for here. A lease
                acquired with no shards ends whole in any case.
        """
        if not self._control.is_closed:
            self._end(self._ending(all_shards))

    def _ending(self, all_shards: bool = False) -> wire.LeaseRelease:
        shards = () if all_shards else sorted({shard for shard, _ in self._extents})
        return wire.LeaseRelease(token=self.token, shards=shards, bad_blocks=self._bad)

    def hand_over(self) -> bytes:
        """Gives the lease to the processes that redeem its token: it is not renewed or released from here."""
        self.is_held = False
        return self.token


class WriteHold(Lease):
    """A hold on the slots of the blocks of a run that are to be written.

    Attributes:
        outcomes: what happened to each block of the run.
        reserved_indexes: indexes in the run of the blocks to store, in order.
        decline_reason: why blocks were declined; UNKNOWN where none were.
        retry_after_s: when to try declined blocks again; None where that does not help.
    """

    def __init__(
        self,
        control: Control,
        spec: NamespaceSpec,
        granted: WriteGrant,
        block_bytes: int,
    ) -> None:
        super().__init__(control, granted.session, spec, granted.grant)
        self.outcomes = granted.outcomes
        self.reserved_indexes = [
            index for index, outcome in enumerate(granted.outcomes) if outcome is ReserveOutcome.RESERVED
        ]
        self.decline_reason = granted.decline_reason
        self.retry_after_s = granted.retry_after_s
        self._block_bytes = block_bytes
        self._extents = granted.extents
        self._committed = 0
        self.session.prefetch({extent.segment_id for extent in granted.extents})

    def copy_in(
        self, sources: Sequence[BlockMemory], blocks: Sequence[int] | None, stream: int = 0
    ) -> Call[Committed]:
        """Checksums and copies the next blocks; returns the Commit to send. settle() must follow.

        stream is the engine's CUDA stream for what is on a GPU: what it was given before has made the blocks.

        Raises:
            InvalidArgument: more sources than reserved blocks, other blocks than the next, wrong sizes.
        """
        self._control.check_usable()
        expected = self.reserved_indexes[self._committed : self._committed + len(sources)]
        if len(expected) != len(sources) or (blocks is not None and list(blocks) != expected):
            raise InvalidArgument(
                "blocks",
                list(blocks) if blocks is not None else f"{len(sources)} sources",
                f"the next reserved blocks are {self.reserved_indexes[self._committed :][:8]}...",
                "give sources of the next reserved_indexes, in order",
            )
        way = self._way(sources, stream)
        pieces = [_pieces(way, source, self._block_bytes, writable=False) for source in sources]
        checksums: list[int] = []
        if self.is_held and pieces:
            with self.session.copying():
                self._copy_checked(expected, pieces, checksums, way)
        self._control.statistics.add(written=len(checksums))
        return self._commit(checksums, len(sources))

    def _copy_checked(
        self, blocks: Sequence[int], pieces: Sequence[Pieces], checksums: list[int], way: Way
    ) -> None:
        """Copies as many blocks as the lease's life allows; appends their checksums."""
        for span, own_way in self._spans(self._extents, blocks[0], blocks[-1] + 1, self._block_bytes, way):
            done = len(checksums)
            try:
                checksums += write_by(own_way, span, pieces[done : done + span.block_count], self.expired)
            except DeviceFault as fault:
                self._in_doubt(fault)
                return
            if len(checksums) < done + span.block_count:
                return

    def _commit(self, checksums: list[int], given: int) -> Call[Committed]:
        """The Commit of what was copied; the blocks that were not count as dropped."""
        left_out = Committed(dropped=given - len(checksums))

        def read(answer: wire.CommitResponse, _sent_at: float) -> Committed:
            committed = committed_of(answer, len(checksums))
            self._committed += len(checksums)
            return committed + left_out

        request = wire.CommitRequest(
            session_id=self.session.session_id,
            token=self.token,
            committed_before_count=self._committed,
            checksums=checksums,
        )
        return Call(
            "Commit",
            request,
            self._control.options.write_timeout_s,
            read,
            Committed(dropped=given),
            session=self.session if checksums and not self.session.is_lost else None,
            spec=self._spec,
        )

    def settle(self, committed: Committed) -> Committed:
        """After a Commit: ends the lease when it is whole, or when a part of it could not be kept."""
        if self._committed == len(self.reserved_indexes):
            self.is_held = False
        elif committed.dropped:
            self.abort()
        return committed

    def abort(self) -> None:
        """Gives up what is not committed, off the caller's way; nobody may be copying. Again does nothing."""
        if not self._control.is_closed:
            self._end(self._ending())

    def _ending(self) -> Abort:
        return Abort(self.token)


def _pieces(way: Way, memory: BlockMemory, block_bytes: int, *, writable: bool) -> Pieces:
    """Addresses of one block's pieces, on the CPU or the GPU."""
    if way.on_device:
        return device_pieces_of(memory, block_bytes)
    return pieces_of(memory, block_bytes, writable=writable)
