"""SlotTable.check(): states, leases, tallies and free runs against each other, in steps (passes.py).

A slot's state, leases and row are verified in place, and so is that each run of FREE
slots is known. What is counted of them all is counted again on a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prefixd_server.base.types import NO_ROW, SlotState
from prefixd_server.catalog.freeruns import FreeRuns
from prefixd_server.catalog.passes import Problems, Steps, gathered, named, stretches

if TYPE_CHECKING:
    from prefixd_server.catalog.segments import PoolOn, SegmentTable

COUNTED = 1 << 16
"""Slots counted in a step."""


def audit_slots(
    table: SegmentTable,
    segments_of: Mapping[int, Sequence[int]],
    tally: Mapping[PoolOn, Sequence[int]],
    free_of: Mapping[PoolOn, FreeRuns],
    held_free: Mapping[int, FreeRuns],
) -> Steps:
    """What is wrong, in words; empty when everything holds."""
    name = table.tier.name
    yield [f"{name}: {words}" for words in _segments(table, segments_of, held_free)]
    for segment in range(table.segment_count):
        for first, end in stretches(max(1, table.segment(segment).slot_count)):
            runs = held_free.get(segment) or free_of.get(_place(table, segment))
            problems = _states(table, segment, first, end) + _runs(table, runs, segment, first, end)
            yield [f"{name}: segment {segment}: {words}" for words in problems]
    for problems in _counts(table, tally, free_of, held_free):
        yield [f"{name}: {words}" for words in problems]
    for problems in _leased(table):
        yield [f"{name}: {words}" for words in problems]


def _segments(
    table: SegmentTable, segments_of: Mapping[int, Sequence[int]], held_free: Mapping[int, FreeRuns]
) -> Problems:
    """Segments are on the list of the pool that they serve; the free runs of held ones are kept aside."""
    listed = {segment: pool for pool, segments in segments_of.items() for segment in segments}
    problems = []
    for segment in range(table.segment_count):
        record = table.segment(segment)
        if listed.get(segment, -1) != record.pool:
            problems.append(f"segment {segment} serves pool {record.pool}, its list says otherwise")
        if record.held != (segment in held_free):
            problems.append(f"segment {segment} is held without its free runs aside, or the other way")
    return problems


def _states(table: SegmentTable, segment: int, first: int, end: int) -> Problems:
    """States, leases and rows of some of one segment's slots; behind its last slot is nothing."""
    slots = table.slots_in(segment)
    where = slice(slots.start + first, min(slots.start + end, slots.stop))
    state, leases, with_row = table.state[where], table.leases[where], table.row[where] != NO_ROW
    free_or_bad = (state == SlotState.FREE) | (state == SlotState.QUARANTINED)
    doomed = (state == SlotState.EVICTING) & ~with_row
    beyond = slice(slots.stop, (segment + 1) * table.stride if first == 0 else slots.stop)
    return [
        *named(state > max(SlotState), "a slot's state is none"),
        *named(free_or_bad & with_row, "a FREE or QUARANTINED slot names a block"),
        *named((state == SlotState.RESIDENT) & ~with_row, "a RESIDENT slot names no block"),
        *named(
            ((state == SlotState.FREE) | (state == SlotState.RESERVED)) & (leases > 0),
            "a FREE or RESERVED slot is leased",
        ),
        *named(doomed & (leases == 0), "a doomed slot is not leased"),
        *named(
            table.state[beyond].any() or table.leases[beyond].any(),
            "what lies behind the last slot is not FREE and unleased",
        ),
    ]


def _runs(table: SegmentTable, runs: FreeRuns | None, segment: int, first: int, end: int) -> Problems:
    """Every maximal run of FREE slots that begins among these is known, from end to end."""
    slots = table.slots_in(segment)
    start, stop = slots.start + first, min(slots.start + end, slots.stop)
    before = first > 0 and table.state[start - 1] == SlotState.FREE
    free = np.concatenate([[before], table.state[start:stop] == SlotState.FREE, [False]])
    begins = (np.flatnonzero(free[1:] & ~free[:-1]) + start).tolist()
    ends = (np.flatnonzero(free[:-1] & ~free[1:])[int(before) :] + start).tolist()
    if begins and ends[-1] == stop:
        taken = table.state[stop : slots.stop] != SlotState.FREE
        ends[-1] += int(taken.argmax()) if taken.any() else len(taken)
    known = runs is not None and all(
        runs.end_of(begin) == end for begin, end in zip(begins, ends, strict=True)
    )
    return named(bool(begins) and not known, "the free runs are not the FREE slots")


def _counts(
    table: SegmentTable,
    tally: Mapping[PoolOn, Sequence[int]],
    free_of: Mapping[PoolOn, FreeRuns],
    held_free: Mapping[int, FreeRuns],
) -> Steps:
    """Slots by state of every pool; runs and slots that are FREE, of pools and of held segments."""
    states = yield from gathered(lambda: [table.state[part] for part in _parts(table)])
    lengths = [part.stop - part.start for part in _parts(table)]
    places = [_place(table, segment) for segment in range(table.segment_count)]
    tallies = {place: list(counts) for place, counts in tally.items()}
    told: dict[tuple[PoolOn | int, bool], tuple[int, int]] = {}
    told |= {(place, False): (free.run_count, free.slot_count) for place, free in free_of.items()}
    told |= {(segment, True): (free.run_count, free.slot_count) for segment, free in held_free.items()}
    yield []
    by_state = {place: np.zeros(len(SlotState), dtype=np.int64) for place in tallies}
    found: Counter[tuple[PoolOn | int, bool, str]] = Counter()
    at = 0
    for segment, length in enumerate(lengths):
        held = (segment, True) in told
        owner = (segment if held else places[segment], held)
        for first, end in stretches(length, COUNTED):
            part = states[at + first : at + end]
            by_state[places[segment]] += np.bincount(part, minlength=len(SlotState))[: len(SlotState)]
            free = part == SlotState.FREE
            before = first > 0 and states[at + first - 1] == SlotState.FREE
            found[*owner, "runs"] += int(np.count_nonzero(free[1:] & ~free[:-1])) + int(
                free[0] and not before
            )
            found[*owner, "slots"] += int(np.count_nonzero(free))
            yield []
        at += length
    yield [
        f"pool {place[0]} counts {tallies[place]} slots by state, there are {counts.tolist()}"
        for place, counts in by_state.items()
        if counts.tolist() != tallies[place]
    ]
    yield named(
        any(counts != (found[*owner, "runs"], found[*owner, "slots"]) for owner, counts in told.items()),
        "free runs hold other slots than are FREE",
    )


def _leased(table: SegmentTable) -> Steps:
    """So many slots have leases."""
    leases = yield from gathered(lambda: [table.leases[part] for part in _parts(table)])
    counted, found = table.leased_count, 0
    for first, end in stretches(len(leases), COUNTED):
        yield []
        found += int(np.count_nonzero(leases[first:end]))
    yield named(found != counted, f"{counted} slots are counted as leased, there are {found}")


def _place(table: SegmentTable, segment: int) -> PoolOn:
    """The pool that a segment serves, and the device that it lies on."""
    return table.pool_of(segment), table.device_of(segment)


def _parts(table: SegmentTable) -> list[slice]:
    """The slots of every segment."""
    return [table.slots_in(segment) for segment in range(table.segment_count)]
