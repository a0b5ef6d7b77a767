"""Which segments of a tier serve which pool, and where their free slots are.

The base of SlotTable (slots.py), which adds the transitions of single slots.
A segment serves one pool, so one slot size, at a time. A held segment is being
emptied: its slots live on and nothing new is allocated in it. A tier lies on one
device or on several, each with as many segments in a row; room is sought on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_ROW, SLOT_ALIGNMENT_BYTES, Rows, Slots, SlotState, Tier
from prefixd_server.catalog.freeruns import RUN_BYTES, FreeRuns
from prefixd_server.catalog.reserved import reserve

PoolOn: TypeAlias = tuple[int, int]
"""A pool on a device."""
NO_POOL = -1
_PAGE_BYTES = 4096


@dataclass(slots=True)
class Segment:
    """What one segment serves now. pool is NO_POOL and slot_count 0 while it serves nobody.

    segment_id is the wire's: it stands for the present memory and is never used again.
    """

    pool: int = NO_POOL
    slot_bytes: int = 0
    slot_count: int = 0
    segment_id: int = 0
    generation: int = 0
    held: bool = False


class SegmentTable:
    """See the module.

    Args:
        tier: whose slots these are.
        segment_bytes: of every segment, a multiple of SLOT_ALIGNMENT_BYTES.
        segment_count: segments of the tier, on all devices.
        device_count: devices that they lie on; a divisor of segment_count.
    """

    def __init__(self, tier: Tier, segment_bytes: int, segment_count: int, device_count: int = 1) -> None:
        assert segment_count % device_count == 0, "every device has as many segments"
        self.tier = tier
        self.segment_bytes = segment_bytes
        self.segment_count = segment_count
        self.device_count = device_count
        self._segments_per_device = segment_count // device_count
        self.stride = segment_bytes // SLOT_ALIGNMENT_BYTES
        """Slot ids per segment: the most slots that one can have."""
        length = self.stride * segment_count
        self.state: NDArray[np.uint8] = reserve(np.uint8, length)
        self.leases: NDArray[np.uint32] = reserve(np.uint32, length)
        self.leased_count = 0
        """Slots with a lease or more."""
        self.row: NDArray[np.int32] = reserve(np.int32, length)
        """Row of the block whose copy the slot holds, else NO_ROW; meaningless where no pool is served."""
        self._segments = [Segment() for _ in range(segment_count)]
        self._pool_of = np.full(segment_count, NO_POOL, dtype=np.int32)
        self._segments_of: dict[int, list[int]] = {}
        self._free_of: dict[PoolOn, FreeRuns] = {}
        self._held_free: dict[int, FreeRuns] = {}
        """Free slots of held segments, by segment."""
        self._tally: dict[PoolOn, list[int]] = {}
        """Slots by SlotState, per pool and device."""
        self._touched = np.zeros(segment_count, dtype=np.int64)
        """Most slots that each segment ever had."""

    def assign(self, segment: int, pool: int, slot_bytes: int, segment_id: int, generation: int = 0) -> None:
        """An unassigned segment serves `pool` from now on, all its slots FREE."""
        first, end = self._serve(segment, Segment(pool, slot_bytes, 0, segment_id, generation))
        where = pool, self.device_of(segment)
        self._free_of[where].add(first, end)
        self._tally[where][SlotState.FREE] += end - first

    def adopt(self, segment: int, pool: int, slot_bytes: int, segment_id: int, generation: int) -> None:
        """assign(), all its slots RESERVED: what lies in them is still to be found out."""
        first, end = self._serve(segment, Segment(pool, slot_bytes, 0, segment_id, generation))
        self.state[first:end] = SlotState.RESERVED
        self._tally[pool, self.device_of(segment)][SlotState.RESERVED] += end - first

    def _serve(self, segment: int, record: Segment) -> tuple[int, int]:
        """Writes down what an unassigned segment serves; its slots, [first, end)."""
        present, pool, slot_bytes = self._segments[segment].pool, record.pool, record.slot_bytes
        assert present == NO_POOL, f"segment {segment} serves pool {present} already"
        assert slot_bytes % SLOT_ALIGNMENT_BYTES == 0, f"slot of {slot_bytes} bytes is not aligned"
        count = self.segment_bytes // slot_bytes
        assert count > 0, f"a slot of {slot_bytes} bytes does not fit a segment of {self.segment_bytes}"
        record.slot_count = count
        self._segments[segment] = record
        self._pool_of[segment] = pool
        self._segments_of.setdefault(pool, []).append(segment)
        first = segment * self.stride
        self.row[first : first + count] = NO_ROW
        self._touched[segment] = max(int(self._touched[segment]), count)
        where = pool, self.device_of(segment)
        if where not in self._free_of:
            self._free_of[where] = FreeRuns(self.stride)
            self._tally[where] = [0] * len(SlotState)
        return first, first + count

    def unassign(self, segment: int) -> None:
        """An empty segment serves nobody from now on. It may be held."""
        record = self._segments[segment]
        assert record.pool != NO_POOL, f"segment {segment} serves nobody"
        assert self.is_empty(segment), f"segment {segment} is not empty"
        self._runs_of(segment).take_segment(segment * self.stride)
        self._tally[record.pool, self.device_of(segment)][SlotState.FREE] -= record.slot_count
        self._segments_of[record.pool].remove(segment)
        self._pool_of[segment] = NO_POOL
        self._held_free.pop(segment, None)
        self._segments[segment] = Segment()

    def hold(self, segment: int) -> None:
        """Nothing is allocated in the segment until unhold(): it is to be emptied."""
        record = self._segments[segment]
        assert record.pool != NO_POOL, f"segment {segment} serves nobody"
        assert not record.held, f"segment {segment} is held already"
        record.held = True
        aside = self._held_free[segment] = FreeRuns(self.stride)
        for start, end in self._free_of[record.pool, self.device_of(segment)].take_segment(
            segment * self.stride
        ):
            aside.add(start, end)

    def unhold(self, segment: int) -> None:
        """Ends hold(); does nothing when the segment is not held (any more)."""
        aside = self._held_free.pop(segment, None)
        if aside is not None:
            record = self._segments[segment]
            record.held = False
            for start, end in aside.runs():
                self._free_of[record.pool, self.device_of(segment)].add(start, end)

    def is_held(self, segment: int) -> bool:
        """Whether hold() is in force."""
        return self._segments[segment].held

    def segment(self, segment: int) -> Segment:
        """What a segment serves now; read only."""
        return self._segments[segment]

    def pool_of(self, segment: int) -> int:
        """The pool that a segment serves, or NO_POOL."""
        return self._segments[segment].pool

    def segments_of(self, pool: int) -> list[int]:
        """Segments that serve the pool, in order of assignment."""
        return list(self._segments_of.get(pool, ()))

    def segment_count_of(self, pool: int) -> int:
        """How many segments serve the pool."""
        return len(self._segments_of.get(pool, ()))

    def empty_of(self, pool: int, device: int = 0) -> int | None:
        """A segment of the pool on the device whose every slot can be allocated; None when it has none."""
        runs = self._free_of.get((pool, device))
        if runs is None or runs.slot_count == 0:
            return None
        start = runs.start_of(self._segments[self._segments_of[pool][0]].slot_count)
        return None if start is None else start // self.stride

    def unassigned(self) -> list[int]:
        """Segments that serve nobody, ascending."""
        return np.flatnonzero(self._pool_of == NO_POOL).tolist()

    def device_of(self, segment: int) -> int:
        """The device that a segment lies on."""
        return segment // self._segments_per_device

    def segments_on(self, device: int) -> range:
        """The segments of a device."""
        first = device * self._segments_per_device
        return range(first, first + self._segments_per_device)

    @property
    def device_slots(self) -> list[range]:
        """The slot ids of each device."""
        count = self.stride * self._segments_per_device
        return [range(device * count, (device + 1) * count) for device in range(self.device_count)]

    def devices_of(self, slots: Slots) -> NDArray[np.uint32]:
        """The device that each slot lies on; none that there is for NO_SLOT."""
        devices: NDArray[np.uint32] = slots // np.uint32(self.stride * self._segments_per_device)
        return devices

    def slots_in(self, segment: int) -> slice:
        """The slot ids of a segment's slots."""
        first = segment * self.stride
        return slice(first, first + self._segments[segment].slot_count)

    def rows_in(self, segment: int) -> Rows:
        """Rows of the blocks with a copy, whole or being written, in the segment; by slot."""
        rows = self.row[self.slots_in(segment)]
        return rows[rows >= 0]

    def is_empty(self, segment: int) -> bool:
        """Whether every slot is FREE."""
        return not self.state[self.slots_in(segment)].any()

    def can_empty(self, segment: int) -> bool:
        """Whether every slot is FREE, or readable and unleased: eviction could empty the segment now."""
        where = self.slots_in(segment)
        states = self.state[where]
        going = (states == SlotState.FREE) | (states == SlotState.RESIDENT)
        return bool(going.all()) and not self.leases[where].any()

    def occupancy(self, pool: int) -> NDArray[np.int64]:
        """Slots that are not FREE, per segment of the pool, in the order of segments_of()."""
        counts = [np.count_nonzero(self.state[self.slots_in(s)]) for s in self.segments_of(pool)]
        return np.array(counts, dtype=np.int64)

    def segment_of(self, slot: int) -> int:
        """Index of the slot's segment."""
        return slot // self.stride

    def slot_bytes_of(self, slot: int) -> int:
        """Bytes of the slot, its stride."""
        return self._segments[slot // self.stride].slot_bytes

    def free_count(self, pool: int, device: int = 0) -> int:
        """Slots that can be allocated on the device now: FREE and not in a held segment."""
        runs = self._free_of.get((pool, device))
        return 0 if runs is None else runs.slot_count

    def slot_count(self, pool: int, device: int = 0) -> int:
        """Slots of the pool on the device."""
        return sum(self._tally.get((pool, device), ()))

    @property
    def touched_bytes(self) -> int:
        """Memory in use: of each array the pages that the segments' slots lie on, and the free runs."""
        arrays = (self.state, self.leases, self.row)
        pages = sum(-(-self._touched * array.itemsize // _PAGE_BYTES) for array in arrays)
        whole = _PAGE_BYTES * int(np.sum(pages))
        dense = sum(array.nbytes for array in arrays)
        runs = [*self._free_of.values(), *self._held_free.values()]
        return min(whole, dense) + RUN_BYTES * sum(free.run_count for free in runs)

    def _runs_of(self, segment: int) -> FreeRuns:
        aside = self._held_free.get(segment)
        pool = self._segments[segment].pool
        return self._free_of[pool, self.device_of(segment)] if aside is None else aside
