"""SlotTable.check(): states, leases, tallies and free runs against each other. A whole pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prefixd_server.base.types import NO_ROW, SlotState
from prefixd_server.catalog.freeruns import FreeRuns

if TYPE_CHECKING:
    from prefixd_server.catalog.segments import SegmentTable


def audit_slots(
    table: SegmentTable,
    segments_of: Mapping[int, Sequence[int]],
    tally: Mapping[int, Sequence[int]],
    free_of: Mapping[int, FreeRuns],
    held_free: Mapping[int, FreeRuns],
) -> list[str]:
    """What is wrong, in words; empty when everything holds."""
    problems = []
    name = table.tier.name
    leased = sum(
        int(np.count_nonzero(table.leases[table.slots_in(segment)])) for segment in range(table.segment_count)
    )
    if leased != table.leased_count:
        problems.append(f"{name}: {table.leased_count} slots are counted as leased, there are {leased}")
    listed = {segment: pool for pool, segments in segments_of.items() for segment in segments}
    for segment in range(table.segment_count):
        record = table.segment(segment)
        if listed.get(segment, -1) != record.pool:
            problems.append(f"{name}: segment {segment} serves pool {record.pool}, its list says otherwise")
        if record.held != (segment in held_free):
            problems.append(
                f"{name}: segment {segment} is held without its free runs aside, or the other way"
            )
        problems += [f"{name}: segment {segment}: {words}" for words in _states(table, segment)]
    for pool, segments in segments_of.items():
        counted = np.zeros(len(SlotState), dtype=np.int64)
        for segment in segments:
            counted += np.bincount(table.state[table.slots_in(segment)], minlength=len(SlotState))
        if counted.tolist() != list(tally[pool]):
            problems.append(
                f"{name}: pool {pool} counts {list(tally[pool])} slots by state, there are {counted.tolist()}"
            )
        for held, free in [
            (False, free_of[pool]),
            *((True, held_free[s]) for s in segments if s in held_free),
        ]:
            wanted = [s for s in segments if table.is_held(s) == held and (not held or held_free[s] is free)]
            if free.runs() != _free_runs(table, wanted):
                problems.append(f"{name}: pool {pool}: the free runs are not the FREE slots")
            if free.slot_count != sum(end - start for start, end in free.runs()):
                problems.append(
                    f"{name}: pool {pool}: the free runs hold another number of slots than they count"
                )
    return problems


def _states(table: SegmentTable, segment: int) -> list[str]:
    """What is wrong between states, leases and rows of one segment's slots."""
    where = table.slots_in(segment)
    state, leases, with_row = table.state[where], table.leases[where], table.row[where] != NO_ROW
    problems = []
    if (state > max(SlotState)).any():
        problems.append("a slot's state is none")
    if with_row[(state == SlotState.FREE) | (state == SlotState.QUARANTINED)].any():
        problems.append("a FREE or QUARANTINED slot names a block")
    if not with_row[state == SlotState.RESIDENT].all():
        problems.append("a RESIDENT slot names no block")
    if leases[(state == SlotState.FREE) | (state == SlotState.RESERVED)].any():
        problems.append("a FREE or RESERVED slot is leased")
    if not leases[(state == SlotState.EVICTING) & ~with_row].all():
        problems.append("a doomed slot is not leased")
    beyond = slice(where.stop, (segment + 1) * table.stride)
    if table.state[beyond].any() or table.leases[beyond].any():
        problems.append("what lies behind the last slot is not FREE and unleased")
    return problems


def _free_runs(table: SegmentTable, segments: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of FREE slots, from the states alone."""
    runs: list[tuple[int, int]] = []
    for segment in sorted(segments):
        where = table.slots_in(segment)
        free = np.concatenate([[False], table.state[where] == SlotState.FREE, [False]])
        edges = (np.flatnonzero(free[1:] != free[:-1]) + where.start).tolist()
        runs += zip(edges[::2], edges[1::2], strict=True)
    return runs
