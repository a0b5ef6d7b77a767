"""SlotTable against a naive model, and the promises that its callers rely on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefixd_server.base.types import SlotState, Tier
from prefixd_server.catalog.slots import SlotTable

KIB = 1024
SEGMENT_BYTES = 256 * KIB


def one_pool(segment_count: int, slot_bytes: int = 64 * KIB, segment_bytes: int = 16 << 20) -> SlotTable:
    table = SlotTable(Tier.DRAM, segment_bytes, segment_count)
    for segment in range(segment_count):
        table.assign(segment, 0, slot_bytes, segment_id=segment + 1)
    return table


def array(*slots: int) -> np.ndarray:
    return np.array(slots, dtype=np.uint32)


def rows(slots: np.ndarray) -> np.ndarray:
    """A row per slot that tells which slot it is in."""
    return slots.astype(np.int32) + 7


def test_a_run_of_512_lies_in_at_most_4_extents_of_a_fresh_store() -> None:
    table = one_pool(segment_count=8)
    for _ in range(4):
        slots = table.allocate(0, 512)
        assert len(slots) == 512
        assert len(table.extents(slots, None)) <= 4


def test_a_run_is_continued_behind_its_last_slot() -> None:
    table = one_pool(segment_count=1)
    first = table.allocate(0, 10)
    second = table.allocate(0, 10, after=int(first[-1]))
    assert len(table.extents(np.concatenate([first, second]), None)) == 1


def test_a_small_run_takes_the_smallest_hole_that_fits_and_leaves_the_large_one_whole() -> None:
    table = one_pool(segment_count=1)
    slots = table.allocate(0, 256)
    table.free(slots[10:15])
    table.free(slots[100:140])
    assert table.allocate(0, 4).tolist() == slots[10:14].tolist()
    assert len(table.extents(table.allocate(0, 40), None)) == 1


def test_what_is_missing_is_told_by_fewer_slots() -> None:
    table = one_pool(segment_count=1)
    assert len(table.allocate(0, 1000)) == 256
    assert len(table.allocate(0, 1)) == 0
    assert len(table.allocate(pool=5, count=1)) == 0


def test_extents_name_segment_offset_stride_and_their_checksums() -> None:
    table = one_pool(segment_count=2)
    slots = np.concatenate([np.arange(250, 256), np.arange(table.stride, table.stride + 3)]).astype(np.uint32)
    checksums = np.arange(9, dtype=np.uint64)
    first, second = table.extents(slots, checksums, first_block=100)
    assert (first.segment_id, first.offset_bytes, first.stride_bytes) == (1, 250 * 65536, 65536)
    assert (first.first_block, first.block_count) == (100, 6)
    assert (second.segment_id, second.offset_bytes, second.first_block) == (2, 0, 106)
    assert second.checksums is not None
    assert second.checksums.tolist() == [6, 7, 8]


def test_extents_end_at_a_segment_that_is_full_of_the_smallest_slots() -> None:
    table = one_pool(segment_count=2, slot_bytes=4096, segment_bytes=64 * KIB)
    slots = table.allocate(0, 32)
    assert [e.block_count for e in table.extents(slots, None)] == [16, 16]
    table.free(slots)
    assert table.check() == []


def test_a_leased_slot_that_is_freed_stays_until_its_last_lease_ends() -> None:
    table = one_pool(segment_count=1)
    slots = table.allocate(0, 3)
    table.publish(slots, rows(slots))
    table.lease(slots[:2])
    table.lease(slots[:1])
    assert table.free(slots).tolist() == slots[2:].tolist()
    assert table.state[slots].tolist() == [SlotState.EVICTING, SlotState.EVICTING, SlotState.FREE]
    assert table.row[slots].tolist() == [-1, -1, -1]
    assert table.unlease(slots[:2]).tolist() == [int(slots[1])]
    assert table.unlease(slots[:1]).tolist() == [int(slots[0])]
    assert table.counts(0).free == 256
    assert table.check() == []


def test_a_leased_bad_slot_that_is_lifted_stays_until_its_last_lease_ends() -> None:
    table = one_pool(segment_count=1)
    slots = table.allocate(0, 1)
    table.publish(slots, rows(slots))
    table.lease(slots)
    table.quarantine(slots)
    assert len(table.lift(slots)) == 0
    assert table.unlease(slots).tolist() == slots.tolist()
    assert table.check() == []


@pytest.mark.parametrize("step", ["publish", "lift", "lease", "unlease", "free", "evicting", "quarantine"])
def test_a_transition_from_a_free_slot_is_refused(step: str) -> None:
    table = one_pool(segment_count=1)
    slots = array(3)
    arguments = (slots, rows(slots)) if step == "publish" else (slots,)
    with pytest.raises(AssertionError):
        getattr(table, step)(*arguments)
    assert table.check() == []


def test_a_doomed_slot_cannot_be_freed_again() -> None:
    table = one_pool(segment_count=1)
    slots = table.allocate(0, 1)
    table.publish(slots, rows(slots))
    table.lease(slots)
    table.free(slots)
    with pytest.raises(AssertionError, match="freed twice"):
        table.free(slots)


def test_nothing_is_allocated_in_a_held_segment() -> None:
    table = one_pool(segment_count=2)
    slots = table.allocate(0, 100)
    segment = table.segment_of(int(slots[0]))
    table.hold(segment)
    other = table.allocate(0, 1000)
    assert {table.segment_of(slot) for slot in other.tolist()} == {1 - segment}
    assert table.free_count(0) == 0
    table.free(slots)
    assert table.free_count(0) == 0
    assert table.counts(0).free == 256
    assert table.check() == []
    table.unhold(segment)
    assert table.free_count(0) == 256


def test_a_segment_serves_another_size_once_it_is_empty() -> None:
    table = one_pool(segment_count=1)
    slots = table.allocate(0, 5)
    table.hold(0)
    with pytest.raises(AssertionError, match="not empty"):
        table.unassign(0)
    table.free(slots)
    table.unassign(0)
    assert table.unassigned() == [0]
    table.assign(0, 1, 1 << 20, segment_id=9)
    assert table.slot_count(0) == 0
    assert table.slot_count(1) == 16
    assert table.extents(table.allocate(1, 16), None)[0].segment_id == 9
    table.unhold(0)
    assert table.check() == []


def test_whether_a_segment_can_be_emptied_tells_leases_writers_and_quarantine() -> None:
    table = one_pool(segment_count=1)
    slots = table.allocate(0, 1)
    assert not table.can_empty(0)
    table.publish(slots, rows(slots))
    assert table.can_empty(0)
    assert table.occupancy(0).tolist() == [1]
    table.lease(slots)
    assert not table.can_empty(0)
    table.unlease(slots)
    table.quarantine(slots)
    assert not table.can_empty(0)


def test_memory_is_counted_by_what_was_touched() -> None:
    table = SlotTable(Tier.DRAM, 256 << 20, 4096)
    assert table.touched_bytes == 0
    table.assign(7, 0, 64 * KIB, segment_id=1)
    assert 9 * 4096 <= table.touched_bytes <= 9 * 4096 + 1000


class SlotsMachine(RuleBasedStateMachine):
    """Random transitions; the model is a dict from slot to state, leases and doom."""

    SIZES = (4 * KIB, 20 * KIB, 64 * KIB)

    @initialize()
    def begin(self) -> None:
        self.table = SlotTable(Tier.DRAM, SEGMENT_BYTES, 4)
        self.model: dict[int, tuple[SlotState, int, bool]] = {}
        self.pools: dict[int, int] = {}
        self.next_id = 1

    def pick(self, data: st.DataObject, *states: SlotState, doomed: bool = False) -> np.ndarray:
        able = sorted(s for s, (state, _, doom) in self.model.items() if state in states and doom == doomed)
        if not able:
            return array()
        return array(*data.draw(st.lists(st.sampled_from(able), unique=True, max_size=20)))

    def settle(self, slots: np.ndarray) -> None:
        """The model's free(): leased slots are doomed."""
        for slot in slots.tolist():
            leases = self.model[slot][1]
            self.model[slot] = (SlotState.EVICTING, leases, True) if leases else (SlotState.FREE, 0, False)

    @precondition(lambda self: len(self.pools) < 4)
    @rule(data=st.data(), pool=st.integers(0, 2))
    def assign(self, data: st.DataObject, pool: int) -> None:
        segment = data.draw(st.sampled_from(self.table.unassigned()))
        self.table.assign(segment, pool, self.SIZES[pool], self.next_id)
        self.next_id += 1
        self.pools[segment] = pool
        for slot in range(*self.table.slots_in(segment).indices(1 << 30)):
            self.model[slot] = (SlotState.FREE, 0, False)

    @rule(segment=st.integers(0, 3))
    def unassign(self, segment: int) -> None:
        if segment in self.pools and self.table.is_empty(segment):
            for slot in range(*self.table.slots_in(segment).indices(1 << 30)):
                del self.model[slot]
            self.table.unassign(segment)
            del self.pools[segment]

    @rule(segment=st.integers(0, 3))
    def hold_or_not(self, segment: int) -> None:
        if segment in self.pools and not self.table.is_held(segment):
            self.table.hold(segment)
        else:
            self.table.unhold(segment)

    @rule(pool=st.integers(0, 2))
    def seek_an_empty_segment(self, pool: int) -> None:
        table = self.table
        empty = {s for s in table.segments_of(pool) if table.is_empty(s) and not table.is_held(s)}
        found = table.empty_of(pool)
        assert found in empty if empty else found is None

    @rule(pool=st.integers(0, 2), count=st.integers(0, 40), after=st.none() | st.integers(0, 255))
    def allocate(self, pool: int, count: int, after: int | None) -> None:
        free = {
            slot
            for slot, (state, _, _) in self.model.items()
            if state == SlotState.FREE
            and self.pools[slot // self.table.stride] == pool
            and not self.table.is_held(slot // self.table.stride)
        }
        assert self.table.free_count(pool) == len(free)
        slots = self.table.allocate(pool, count, after)
        assert len(slots) == min(count, len(free))
        assert set(slots.tolist()) <= free
        for slot in slots.tolist():
            self.model[slot] = (SlotState.RESERVED, 0, False)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slots = self.pick(data, SlotState.RESERVED)
        self.table.publish(slots, rows(slots))
        for slot in slots.tolist():
            self.model[slot] = (SlotState.RESIDENT, 0, False)

    @rule(data=st.data())
    def evicting(self, data: st.DataObject) -> None:
        slots = self.pick(data, SlotState.RESIDENT)
        self.table.evicting(slots)
        for slot in slots.tolist():
            self.model[slot] = (SlotState.EVICTING, self.model[slot][1], False)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = self.pick(data, SlotState.RESERVED, SlotState.RESIDENT, SlotState.EVICTING)
        freed = self.table.free(slots)
        self.settle(slots)
        assert all(self.model[slot][0] == SlotState.FREE for slot in freed.tolist())

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        slots = self.pick(data, SlotState.RESERVED, SlotState.RESIDENT)
        self.table.quarantine(slots)
        for slot in slots.tolist():
            self.model[slot] = (SlotState.QUARANTINED, self.model[slot][1], False)

    @rule(data=st.data())
    def lift(self, data: st.DataObject) -> None:
        slots = self.pick(data, SlotState.QUARANTINED)
        self.table.lift(slots)
        self.settle(slots)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        slots = self.pick(data, SlotState.RESIDENT)
        self.table.lease(slots)
        for slot in slots.tolist():
            state, leases, _ = self.model[slot]
            self.model[slot] = (state, leases + 1, False)

    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        able = sorted(slot for slot, (_, leases, _) in self.model.items() if leases)
        slots = array(*data.draw(st.lists(st.sampled_from(able), unique=True))) if able else array()
        freed = set(self.table.unlease(slots).tolist())
        for slot in slots.tolist():
            state, leases, doomed = self.model[slot]
            gone = doomed and leases == 1
            assert (slot in freed) == gone
            self.model[slot] = (SlotState.FREE, 0, False) if gone else (state, leases - 1, doomed)

    @invariant()
    def everything_agrees(self) -> None:
        assert self.table.check() == []
        for slot, (state, leases, doomed) in self.model.items():
            assert self.table.state[slot] == state
            assert self.table.leases[slot] == leases
            assert not doomed or self.table.row[slot] == -1
        counts = self.table.counts()
        assert counts.total == len(self.model)
        states = [state for state, _, _ in self.model.values()]
        assert counts.quarantined == states.count(SlotState.QUARANTINED)
        assert counts.resident == states.count(SlotState.RESIDENT) + states.count(SlotState.EVICTING)
        assert self.table.lease_total() == sum(leases for _, leases, _ in self.model.values())
        held = [s for s, (st_, _, d) in self.model.items() if st_ == SlotState.RESIDENT]
        assert set(held) <= set(self.table.slots_with_row().tolist())


TestSlotsAgainstModel = SlotsMachine.TestCase
TestSlotsAgainstModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
