"""The slots of one tier: their states and the leases on them.

    FREE -> RESERVED -> RESIDENT (-> EVICTING) -> FREE
    RESERVED, RESIDENT, EVICTING -> QUARANTINED -> FREE

allocate() makes FREE slots RESERVED; publish, evicting, free, quarantine and
lift are the other arrows, each over a whole array of distinct slots. A slot
that is freed or lifted while leased is *doomed*: EVICTING without a row until
its last unlease(), which makes it FREE.

Not here: whose block a slot holds beyond its row, bytes, and the choice of what
to evict. The event loop owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.accounts import TierStats
from prefixd_server.base.types import NO_ROW, Checksums, Extent, Rows, Slots, SlotState, Tier
from prefixd_server.catalog.freeruns import run_edges, slots_of
from prefixd_server.catalog.passes import Steps, everything
from prefixd_server.catalog.segments import SegmentTable
from prefixd_server.catalog.slot_audit import audit_slots

_FREE, _RESERVED, _RESIDENT, _EVICTING, _QUARANTINED = (int(state) for state in SlotState)
_STATE_COUNT = len(SlotState)


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """free + reserved + resident + quarantined = slots; EVICTING counts as resident."""

    free: int
    reserved: int
    resident: int
    quarantined: int

    @property
    def total(self) -> int:
        """Slots in all."""
        return self.free + self.reserved + self.resident + self.quarantined


class SlotTable(SegmentTable):
    """See the module. `state`, `leases` and `row` are arrays by slot id, read only for others but `row`."""

    # -- transitions ---------------------------------------------------------------------------

    def allocate(self, pool: int, count: int, after: int | None = None, device: int = 0) -> Slots:
        """FREE -> RESERVED for up to `count` slots of the pool on a device, in as few extents as can be.

        Args:
            after: a slot of the pool that the first one should follow, so that a run is continued.

        Returns:
            The slots in the order in which a run should fill them; fewer when fewer are free.
        """
        runs = self._free_of.get((pool, device))
        if runs is None or runs.slot_count == 0:
            return np.zeros(0, dtype=np.uint32)
        slots = slots_of(runs.take(count, after))
        assert not self.state[slots].any(), "allocated a slot that is not free"
        self.state[slots] = _RESERVED
        tally = self._tally[pool, device]
        tally[_FREE] -= len(slots)
        tally[_RESERVED] += len(slots)
        return slots

    def publish(self, slots: Slots, rows: Rows) -> None:
        """RESERVED -> RESIDENT: the slots hold readable copies of the blocks in `rows`."""
        self._expect(slots, (_RESERVED,))
        self._move(slots, _RESIDENT)
        self.row[slots] = rows

    def evicting(self, slots: Slots) -> None:
        """RESIDENT -> EVICTING: still readable by those who hold leases, about to go."""
        self._expect(slots, (_RESIDENT,))
        self._move(slots, _EVICTING)

    def free(self, slots: Slots) -> Slots:
        """RESERVED, RESIDENT or EVICTING -> FREE, or doomed where leased; those FREE now are returned."""
        self._expect(slots, (_RESERVED, _RESIDENT, _EVICTING))
        assert not self._doomed(slots).any(), f"{self.tier.name}: a slot was freed twice"
        return self._let_go(slots)

    def quarantine(self, slots: Slots) -> None:
        """RESERVED, RESIDENT or EVICTING -> QUARANTINED: still writable by somebody, or bad bytes."""
        self._expect(slots, (_RESERVED, _RESIDENT, _EVICTING))
        self._move(slots, _QUARANTINED)
        self.row[slots] = NO_ROW

    def lift(self, slots: Slots) -> Slots:
        """QUARANTINED -> FREE, or doomed where leased; those FREE now are returned."""
        self._expect(slots, (_QUARANTINED,))
        return self._let_go(slots)

    def lease(self, slots: Slots) -> None:
        """One more lease on each of the slots, which are RESIDENT."""
        self._expect(slots, (_RESIDENT,))
        before = self.leases[slots]
        self.leases[slots] = before + np.uint32(1)
        self.leased_count += len(slots) - int(np.count_nonzero(before))

    def unlease(self, slots: Slots) -> Slots:
        """One lease less on each of the slots; the doomed ones that became FREE by it are returned."""
        before = self.leases[slots]
        assert before.all(), "a slot was unleased more often than leased"
        self.leases[slots] = before - np.uint32(1)
        last = before == 1
        self.leased_count -= int(np.count_nonzero(last))
        doomed = last & self._doomed(slots)
        if not doomed.any():
            return slots[:0]
        gone: Slots = slots[doomed]
        self._release(gone)
        return gone

    def _doomed(self, slots: Slots) -> NDArray[np.bool_]:
        """Which slots are free but for their leases."""
        doomed: NDArray[np.bool_] = (self.state[slots] == _EVICTING) & (self.row[slots] == NO_ROW)
        return doomed

    def _let_go(self, slots: Slots) -> Slots:
        self.row[slots] = NO_ROW
        leased = self.leases[slots] > 0
        if leased.any():
            self._move(slots[leased], _EVICTING)
            slots = slots[~leased]
        self._release(slots)
        return slots

    def _release(self, slots: Slots) -> None:
        """Unleased slots become FREE, and part of their pools' free runs."""
        self._move(slots, _FREE)
        ordered = np.sort(slots)
        edges = run_edges(ordered, self.stride)
        for first, last in pairwise(edges):
            start = int(ordered[first])
            self._runs_of(start // self.stride).add(start, start + last - first)

    def _move(self, slots: Slots, to: int) -> None:
        """Sets the state and the tallies."""
        if len(slots) == 0:
            return
        before = self.state[slots]
        self.state[slots] = to
        places = self._pool_of[slots // np.uint32(self.stride)]
        if self.device_count > 1:
            places = places * self.device_count + self.devices_of(slots).astype(np.int32)
        if (places == places[0]).all():
            self._count(int(places[0]), before, to)
        else:
            for place in np.unique(places).tolist():
                self._count(place, before[places == place], to)

    def _count(self, place: int, before: NDArray[np.uint8], to: int) -> None:
        tally = self._tally[divmod(place, self.device_count)]
        for state, left in enumerate(np.bincount(before).tolist()):
            tally[state] -= left
        tally[to] += len(before)

    def _expect(self, slots: Slots, allowed: tuple[int, ...]) -> None:
        """Asserts the states that a transition starts from."""
        states = self.state[slots]
        right = states == allowed[0]
        for other in allowed[1:]:
            right |= states == other
        assert right.all(), f"{self.tier.name}: slots {slots[~right].tolist()} are {states[~right].tolist()}"

    # -- answers -------------------------------------------------------------------------------

    def extents(self, slots: Slots, checksums: Checksums | None, first_block: int = 0) -> tuple[Extent, ...]:
        """The slots of a run, in run order, as extents.

        Args:
            checksums: one per slot, or None for writes.
            first_block: index in the request's run of the first slot's block.
        """
        edges = run_edges(slots, self.stride)
        extents = []
        for first, last in pairwise(edges):
            segment, position = divmod(int(slots[first]), self.stride)
            record = self._segments[segment]
            extents.append(
                Extent(
                    tier=self.tier,
                    segment_id=record.segment_id,
                    offset_bytes=position * record.slot_bytes,
                    stride_bytes=record.slot_bytes,
                    first_block=first_block + first,
                    block_count=last - first,
                    checksums=None if checksums is None else checksums[first:last],
                )
            )
        return tuple(extents)

    def counts(self, pool: int | None = None, device: int | None = None) -> SlotCounts:
        """Slots by state, of one pool or all, on one device or all; those of held segments included."""
        devices = range(self.device_count) if device is None else (device,)
        places = self._tally if pool is None else [(pool, on) for on in devices if (pool, on) in self._tally]
        chosen = [self._tally[place] for place in places if place[1] in devices]
        total = [sum(tally[state] for tally in chosen) for state in range(_STATE_COUNT)]
        return SlotCounts(
            total[_FREE], total[_RESERVED], total[_RESIDENT] + total[_EVICTING], total[_QUARANTINED]
        )

    def stats(self, tier: Tier, pools: Sequence[int]) -> TierStats:
        """What this tier's slots are, and what these pools have of them."""
        counts = [self.counts(pool) for pool in pools]
        return TierStats(
            tier=tier,
            capacity_bytes=self.segment_count * self.segment_bytes,
            assigned_bytes=sum(self.segment_count_of(pool) for pool in pools) * self.segment_bytes,
            segment_count=self.segment_count,
            segment_bytes=self.segment_bytes,
            slot_count=sum(c.total for c in counts),
            free_slot_count=sum(c.free for c in counts),
            reserved_slot_count=sum(c.reserved for c in counts),
            resident_slot_count=sum(c.resident for c in counts),
            quarantined_slot_count=sum(c.quarantined for c in counts),
        )

    def lease_total(self) -> int:
        """Leases on all slots together."""
        return sum(int(self.leases[self.slots_in(segment)].sum()) for segment in range(self.segment_count))

    def slots_with_row(self, segments: range | None = None) -> Slots:
        """Slots, of these segments or all, that hold a block's copy, whole or being written; ascending."""
        found = [
            np.flatnonzero(self.row[self.slots_in(s)] >= 0) + s * self.stride
            for s in segments or range(self.segment_count)
        ]
        return np.concatenate(found).astype(np.uint32)

    def check(self) -> list[str]:
        """Verifies states, leases, tallies and free runs; what is wrong, in words."""
        return everything(self.steps())

    def steps(self) -> Steps:
        """The same, bit by bit (passes.py)."""
        return audit_slots(self, self._segments_of, self._tally, self._free_of, self._held_free)
