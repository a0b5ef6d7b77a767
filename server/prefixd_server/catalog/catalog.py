"""The single truth about blocks: which are known, where their copies lie, who may see them.

`apply(event, now)` is the only mutator, one method per transition; everything
else reads. The catalog composes the columns, the key table, the prefix tree
and one slot table per tier, and keeps what must hold between them (check()).
It owns no bytes, knows no time and no threads; the event loop owns it.

Visibility (DESIGN law 3): a block is visible when it is committed and its
parent is visible. Blocks committed before their parent wait, keyed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from prefixd_server.base.types import NO_ROW, NO_SLOT, Hashes, Rows, Slots, SlotState, Tier
from prefixd_server.catalog import events
from prefixd_server.catalog.audit import audit
from prefixd_server.catalog.columns import COMMITTED, PINNED, VISIBLE
from prefixd_server.catalog.events import Effect, Event
from prefixd_server.catalog.journal import Verb
from prefixd_server.catalog.passes import Steps, everything
from prefixd_server.catalog.reads import CatalogReads, Departure
from prefixd_server.catalog.slots import SlotTable


class Catalog(CatalogReads):
    """See the module.

    In a durable tier every published copy carries one lease more, its index record's:
    a slot there becomes FREE only when the record is gone (RecordsDeleted).

    Args:
        tiers: the slot table of every tier that is on.
        block_count_max: most blocks ever known at once.
        seed: secret of the key table; hostile tenants choose hashes.
        durable: tiers whose copies have index records.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, SlotTable],
        block_count_max: int,
        seed: int,
        durable: frozenset[Tier] = frozenset(),
    ) -> None:
        super().__init__(tiers, block_count_max, seed, durable)
        self._now = 0.0
        self._transitions: dict[type, Callable[[Any], Effect]] = {
            events.BlocksReserved: self._blocks_reserved,
            events.BlocksCommitted: self._blocks_committed,
            events.WriterFailed: self._writer_failed,
            events.SlotsLifted: self._slots_lifted,
            events.RunUsed: self._run_used,
            events.ReplyEnded: self._reply_ended,
            events.AttentionObserved: self._attention_observed,
            events.CopiesLeased: self._copies_leased,
            events.CopiesReleased: self._copies_released,
            events.CopyStarted: self._copy_started,
            events.CopyPublished: self._copy_published,
            events.CopyAbandoned: self._copy_abandoned,
            events.CopyDetached: self._copy_detached,
            events.CopyReplaced: self._copy_replaced,
            events.CopiesEvicted: self._copies_evicted,
            events.BlocksRecovered: self._blocks_recovered,
            events.RecordsDeleted: self._records_deleted,
            events.CopyFoundBad: self._copy_found_bad,
            events.BlocksRemoved: self._blocks_removed,
            events.PinChanged: self._pin_changed,
        }

    def apply(self, event: Event, now: float) -> Effect:
        """The only mutator: carries out one transition at `now` (monotonic seconds)."""
        self._now = now
        return self._transitions[type(event)](event)

    def check(self) -> list[str]:
        """Verifies every cross-link; what is wrong, in words."""
        return everything(self.steps())

    def steps(self) -> Steps:
        """The same, bit by bit (passes.py)."""
        return audit(self)

    # -- transitions of writers ----------------------------------------------------------------

    def _blocks_reserved(self, event: events.BlocksReserved) -> Effect:
        rows = self._new_rows(event.space, event.hashes)
        used_at = self._now if event.used_at is None else event.used_at
        nodes = self.tree.add(event.space, event.parent_row, rows, used_at)
        self.tree.nodes.classify(nodes, event.history)
        if event.returned:
            self.tree.nodes.mark_returned(nodes)
        self._bind(event.tier, rows, event.slots)
        self._tell(Verb.RESERVED, rows)
        return Effect()

    def _blocks_committed(self, event: events.BlocksCommitted) -> Effect:
        table = self.slots[event.tier]
        rows = table.row[event.slots]
        alive = rows >= 0
        if not alive.all():
            table.free(event.slots[~alive])
        rows = rows[alive]
        if len(rows) == 0:
            return Effect(dropped_count=len(alive))
        self.columns.checksum[rows] = event.checksums[alive]
        self.columns.flags[rows] |= COMMITTED
        table.publish(event.slots[alive], rows)
        self._tell(Verb.COMMITTED, rows)
        parent = int(self.columns.parent[rows[0]])
        if parent == NO_ROW or self.columns.flags[parent] & VISIBLE:
            shown = self._show(rows)
            return Effect(
                visible_count=len(rows), waiting_count=shown - len(rows), dropped_count=int((~alive).sum())
            )
        for row, above in zip(rows.tolist(), self.columns.parent[rows].tolist(), strict=True):
            self.waiting.setdefault(above, []).append(row)
        self.waiting_count += len(rows)
        return Effect(waiting_count=len(rows), dropped_count=int((~alive).sum()))

    def _show(self, rows: Rows) -> int:
        """Makes rows visible, and the waiting blocks below them; how many in all."""
        self.columns.flags[rows] |= VISIBLE
        self._tell(Verb.VISIBLE, rows)
        shown = len(rows)
        if not self.waiting:
            return shown
        stack = rows.tolist()
        while stack:
            freed = self.waiting.pop(stack.pop(), None)
            if freed:
                self.waiting_count -= len(freed)
                self.columns.flags[freed] |= VISIBLE
                self._tell(Verb.VISIBLE, np.array(freed, dtype=np.int32))
                shown += len(freed)
                stack.extend(freed)
        return shown

    def _writer_failed(self, event: events.WriterFailed) -> Effect:
        table = self.slots[event.tier]
        rows = table.row[event.slots]
        alive = rows[rows >= 0]
        forgotten = 0
        if len(alive):
            self._tell(Verb.WRITER_FAILED, alive)
            forgotten = self._forget(self.closure(alive))
        if event.quarantine:
            table.quarantine(event.slots)
            return Effect(forgotten_count=forgotten)
        table.free(event.slots)
        return Effect(forgotten_count=forgotten, freed_count=len(event.slots))

    def _slots_lifted(self, event: events.SlotsLifted) -> Effect:
        self.slots[event.tier].lift(event.slots)
        return Effect(freed_count=len(event.slots))

    # -- transitions of readers ----------------------------------------------------------------

    def _run_used(self, event: events.RunUsed) -> Effect:
        self.tree.nodes.classify(self.tree.touch(event.path, self._now), event.history)
        self._tell(Verb.USED, event.path[-1:])
        return Effect()

    def _reply_ended(self, event: events.ReplyEnded) -> Effect:
        self.tree.nodes.end_reply(self.tree.nodes_of(event.path).tolist(), event.used_at, event.reply)
        return Effect()

    def _attention_observed(self, event: events.AttentionObserved) -> Effect:
        np.add.at(self.tree.attention, self.columns.node[event.path], event.mass)
        return Effect()

    def _copies_leased(self, event: events.CopiesLeased) -> Effect:
        self.slots[event.tier].lease(event.slots)
        return Effect()

    def _copies_released(self, event: events.CopiesReleased) -> Effect:
        freed = self.slots[event.tier].unlease(event.slots)
        return Effect(freed_count=len(freed))

    # -- transitions of transfers --------------------------------------------------------------

    def _copy_started(self, event: events.CopyStarted) -> Effect:
        self._bind(event.tier, event.rows, event.slots)
        self._tell(Verb.COPY_STARTED, event.rows)
        return Effect()

    def _copy_published(self, event: events.CopyPublished) -> Effect:
        self.slots[event.tier].publish(event.slots, event.rows)
        if event.tier in self.durable:
            self.slots[event.tier].lease(event.slots)
        self._tell(Verb.COPY_PUBLISHED, event.rows)
        return Effect()

    def _copy_abandoned(self, event: events.CopyAbandoned) -> Effect:
        forgotten = self._detach(event.tier, event.slots)
        self.slots[event.tier].free(event.slots)
        return Effect(forgotten_count=forgotten, freed_count=len(event.slots))

    def _copy_detached(self, event: events.CopyDetached) -> Effect:
        return Effect(forgotten_count=self._detach(event.tier, event.slots))

    def _detach(self, tier: Tier, slots: Slots) -> int:
        """WRITING copies are nobody's from now on; blocks without another one go. Blocks forgotten."""
        rows = self.slots[tier].row[slots]
        rows = rows[rows >= 0]
        if len(rows) == 0:
            return 0
        self.slots[tier].row[slots] = NO_ROW
        self.tree.copies_dropped(tier, rows)
        self.columns.slot[tier][rows] = NO_SLOT
        last = np.ones(len(rows), dtype=np.bool_)
        for slot in self.columns.slot.values():
            last &= slot[rows] == NO_SLOT
        return self._forget(self.closure(rows[last])) if last.any() else 0

    def _copy_replaced(self, event: events.CopyReplaced) -> Effect:
        table = self.slots[event.tier]
        self.columns.slot[event.tier][event.rows] = event.new_slots
        table.publish(event.new_slots, event.rows)
        table.free(event.old_slots)
        self._tell(Verb.MOVED, event.rows)
        return Effect(freed_count=len(event.old_slots))

    def _copies_evicted(self, event: events.CopiesEvicted) -> Effect:
        rows = event.rows
        last = np.ones(len(rows), dtype=np.bool_)
        for other, slot in self.columns.slot.items():
            if other is not event.tier:
                last &= slot[rows] == NO_SLOT
        kept = rows[~last]
        self._tell(Verb.COPY_DROPPED, rows)
        if len(kept):
            self._drop_copies(event.tier, kept)
        gone = rows[last]
        forgotten = self._forget(gone) if len(gone) else 0
        return Effect(forgotten_count=forgotten, freed_count=len(rows))

    def _copy_found_bad(self, event: events.CopyFoundBad) -> Effect:
        table = self.slots[event.tier]
        slot = np.array([event.slot], dtype=np.uint32)
        row = int(table.row[event.slot])
        rows = np.array([row], dtype=np.int32)
        self._tell(Verb.FOUND_BAD, rows)
        if event.tier in self.durable:
            self._drop_copies(event.tier, rows)
        else:
            table.quarantine(slot)
            self.tree.copies_dropped(event.tier, rows)
            self.columns.slot[event.tier][rows] = NO_SLOT
        if any(columns[row] != NO_SLOT for columns in self.columns.slot.values()):
            return Effect()
        return Effect(forgotten_count=self._forget(self.tree.subtree(row)))

    # -- transitions of durable tiers ----------------------------------------------------------

    def _blocks_recovered(self, event: events.BlocksRecovered) -> Effect:
        rows = self._new_rows(event.space, event.hashes)
        self.columns.flags[rows] = COMMITTED | VISIBLE
        self.columns.checksum[rows] = event.checksums
        chains = zip(
            pairwise(event.starts), event.parent_rows, event.parent_places, event.last_use, strict=True
        )
        for (start, end), above, place, last_use in chains:
            parent = int(rows[place]) if place >= 0 else above
            self.tree.add(event.space, parent, rows[start:end], last_use)
        self._bind(event.tier, rows, event.slots)
        self.slots[event.tier].publish(event.slots, rows)
        self.slots[event.tier].lease(event.slots)
        self._tell(Verb.RECOVERED, rows)
        return Effect(visible_count=len(rows))

    def _records_deleted(self, event: events.RecordsDeleted) -> Effect:
        freed = self.slots[event.tier].unlease(event.slots)
        return Effect(freed_count=len(freed))

    # -- transitions on request ----------------------------------------------------------------

    def _blocks_removed(self, event: events.BlocksRemoved) -> Effect:
        return Effect(forgotten_count=self._forget(event.rows))

    def _pin_changed(self, event: events.PinChanged) -> Effect:
        if event.pinned:
            self.columns.flags[event.rows] |= PINNED
        else:
            self.columns.flags[event.rows] &= np.uint8(~PINNED & 0xFF)
        self._tell(Verb.PINNED if event.pinned else Verb.UNPINNED, event.rows)
        return Effect()

    # -- shared steps --------------------------------------------------------------------------

    def _new_rows(self, space: int, hashes: Hashes) -> Rows:
        """Rows for blocks that are not known yet, without copies and flags."""
        rows = self.columns.allocate(len(hashes))
        self.columns.key[rows] = hashes
        self.columns.space[rows] = space
        self.columns.flags[rows] = 0
        self.columns.checksum[rows] = 0
        for slot in self.columns.slot.values():
            slot[rows] = NO_SLOT
        self.keys.insert(rows)
        return rows

    def _bind(self, tier: Tier, rows: Rows, slots: Slots) -> None:
        """RESERVED slots become the WRITING copies of rows."""
        self.columns.slot[tier][rows] = slots
        self.slots[tier].row[slots] = rows
        self.tree.copies_added(tier, rows)

    def _drop_copies(self, tier: Tier, rows: Rows) -> None:
        """Lets go of the rows' copies in `tier`: readable ones become FREE (when unleased),
        those still being written stay RESERVED, detached, until their writer ends."""
        table = self.slots[tier]
        slots = self.columns.slot[tier][rows]
        writing = table.state[slots] == SlotState.RESERVED
        table.row[slots[writing]] = NO_ROW
        gone = rows[~writing]
        if tier in self.durable and len(gone):
            self.departures.append(
                Departure(tier, self.columns.space[gone], self.columns.key[gone], slots[~writing])
            )
        table.free(slots[~writing])
        self.tree.copies_dropped(tier, rows)
        self.columns.slot[tier][rows] = NO_SLOT

    def closure(self, rows: Rows) -> Rows:
        """The rows and everything below, each once, parents before children."""
        tops = rows if len(rows) == 1 else rows[~np.isin(self.columns.parent[rows], rows)]
        if len(tops) == 1:
            return self.tree.subtree(int(tops[0]))
        inner = np.zeros(0, dtype=np.int32)
        seen: set[int] = set()
        parts: list[Rows] = []
        for row in tops.tolist():
            if row not in seen:
                below = self.tree.subtree(row)
                fresh = np.array([r for r in below.tolist() if r not in seen], dtype=np.int32)
                seen.update(fresh.tolist())
                parts.append(fresh)
        return np.concatenate([inner, *parts])

    def _forget(self, rows: Rows) -> int:
        """Forgets blocks (closed under descendants): copies, links, keys, rows."""
        for tier, slot in self.columns.slot.items():
            if tier in self.slots:
                held = rows[slot[rows] != NO_SLOT]
                if len(held):
                    self._drop_copies(tier, held)
        if self.waiting:
            self._forget_waiting(rows)
        self._tell(Verb.FORGOTTEN, rows)
        self.tree.remove(rows)
        self.keys.remove(rows)
        self.columns.free(rows)
        return len(rows)

    def _forget_waiting(self, rows: Rows) -> None:
        unseen = (self.columns.flags[rows] & (COMMITTED | VISIBLE)) == COMMITTED
        for row, above in zip(rows[unseen].tolist(), self.columns.parent[rows[unseen]].tolist(), strict=True):
            siblings = self.waiting[above]
            siblings.remove(row)
            self.waiting_count -= 1
            if not siblings:
                del self.waiting[above]

    def _tell(self, verb: Verb, rows: Rows) -> None:
        self.journal.tell(self._now, verb, self.columns.space[rows], self.columns.key[rows, 0])
