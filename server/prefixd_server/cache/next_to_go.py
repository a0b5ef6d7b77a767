"""What DRAM drops next, chosen ahead of need so that it can be copied to NVMe first.

The policy chooses each node once and not again every tick: chosen nodes stand in
a line until they are dropped, used again, or changed. So the work of a tick
follows what was stored since the last one, and not how much is kept.

Not here: how much stands in line (scheduler.py), and copying (transfers.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_SLOT, Rows, Tier
from prefixd_server.cache.state import State
from prefixd_server.catalog.nodes import NO_NODE
from prefixd_server.catalog.reserved import reserve
from prefixd_server.policy.policy import DaemonPolicy, Victims

CHOICE_BLOCK_COUNT_MAX = 256
"""Blocks chosen in one step, about a millisecond of the loop."""
CHOICE_SHARE_MIN = 1 / 16
CHOICE_BLOCK_COUNT_MIN = 256
"""A line that is short by less than this part of it, and this many blocks, waits: a choice has its price."""
SWEEP_COUNT_MAX = 4
"""Nodes in line that are looked at in one step, whether they were used since."""
ASK_COUNT_MAX = 16
"""Nodes in line that are asked in one step whether they can go."""
AFRESH_EVERY = 16
"""Choices by age that go on where the last one ended, before one looks at what those left behind."""


@dataclass(slots=True)
class Entry:
    """A node in line.

    used_at: its last use when it was chosen; count: of its deepest copies; tried: whether its
    copy was under way; ready: it may go, since NVMe has it or will not have it.
    """

    node: int
    used_at: float
    count: int
    ready: bool
    tried: bool = False


class NextToGo:
    """See the module. Owned by the event loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        node_count_max = state.catalog.tree.nodes.row_count_max
        self._in_line: NDArray[np.bool_] = reserve(np.bool_, node_count_max)
        self._lines: dict[int, deque[Entry]] = {}
        self._unstored: dict[int, deque[Entry]] = {}
        """Of those in line, the ones that are not ready."""
        self._shown: dict[int, Entry] = {}
        """What unstored() has shown last, by its deepest row."""
        self._block_counts: dict[int, int] = {}
        self._reached: dict[int, tuple[int, float]] = {}
        """How far a policy that goes by age has come in each pool: the node, and when that was used."""
        self._until_afresh: dict[int, int] = {}
        """Choices until the next that begins at the old end: at once when only a part of a node has gone."""
        self._chooser: DaemonPolicy | None = None
        state.metered.append(self)

    # -- choosing ------------------------------------------------------------------------------

    def choose(self, pool: int, block_count: int) -> None:
        """Lengthens the line until it has `block_count` copies, by one step at most."""
        if self._chooser is not self._state.policy:
            self._chooser = self._state.policy
            for other in list(self._lines):
                self._clear(other)
        line = self._lines.setdefault(pool, deque())
        for _ in range(min(SWEEP_COUNT_MAX, len(line))):
            entry = line.popleft()
            if self._holds(entry):
                line.append(entry)
            else:
                self._leave(pool, entry)
        short = block_count - self.block_count(pool)
        if short > 0 and short >= min(CHOICE_BLOCK_COUNT_MIN, CHOICE_SHARE_MIN * block_count):
            short = min(short, CHOICE_BLOCK_COUNT_MAX)
            for node, count in self._victims(pool, short):
                entry = Entry(node, self._last_use(node), count, self._is_stored(node, count))
                self._in_line[node] = True
                self._block_counts[pool] = self.block_count(pool) + count
                line.append(entry)
                if not entry.ready:
                    self._unstored.setdefault(pool, deque()).append(entry)

    def _victims(self, pool: int, block_count: int) -> Victims:
        evictable = self._state.catalog.evictable(Tier.DRAM)

        def others(node: int, limit: int) -> int:
            return 0 if self._in_line[node] else evictable(node, limit)

        tree = self._state.catalog.tree
        afresh = self._until_afresh.get(pool, 0) == 0
        reached, used_at = self._reached.get(pool, (NO_NODE, 0.0))
        if afresh or (reached != NO_NODE and self._last_use(reached) != used_at):
            reached = NO_NODE
        view = tree.view(Tier.DRAM, pool, others, without=self._in_line, after=reached)
        victims = self._state.policy.victims(view, block_count, self._state.clock.now(), self._state.rng)
        if afresh:
            self._until_afresh[pool] = AFRESH_EVERY
            return victims
        at = view.reached
        self._reached[pool] = (at, 0.0 if at == NO_NODE else self._last_use(at))
        self._until_afresh[pool] -= 1
        return victims

    @property
    def nbytes(self) -> int:
        """Memory: a byte for each node that was ever there."""
        return self._state.catalog.tree.nodes.high_water

    # -- asking --------------------------------------------------------------------------------

    def block_count(self, pool: int) -> int:
        """Copies in line, some of which have been used since."""
        return self._block_counts.get(pool, 0)

    def unstored(self, pool: int, claimed: Container[int]) -> Iterator[Rows]:
        """Rows of nodes in line that NVMe does not have yet, deepest first, some nodes at a time.

        Once its rows were claimed and are no more, a node may go with or without a copy: when none
        came about, NVMe has better use for the room. That they are claimed is seen here, or told by begun().

        Args:
            claimed: rows on their way already.
        """
        unstored = self._unstored.get(pool, deque())
        self._shown.clear()
        for _ in range(min(ASK_COUNT_MAX, len(unstored))):
            entry = unstored.popleft()
            if not self._holds(entry):
                continue
            rows = self._rows(entry.node, entry.count)
            if int(rows[0]) in claimed:
                entry.tried = True
            elif entry.tried or self._is_stored(entry.node, entry.count):
                entry.ready = True
                continue
            else:
                self._shown[int(rows[0])] = entry
                yield rows
            unstored.append(entry)

    def begun(self, rows: Rows) -> None:
        """Copies of these rows, just shown, are begun: they may have come to nothing before anybody asks."""
        for row in rows.tolist():
            entry = self._shown.get(row)
            if entry is not None:
                entry.tried = True

    def take(self, pool: int, block_count: int) -> Iterator[Rows]:
        """Takes copies that are ready to go out of line, up to `block_count`: to be dropped now."""
        line = self._lines.get(pool)
        if line is None:
            return
        evictable = self._state.catalog.evictable(Tier.DRAM)
        kids = self._state.catalog.tree.tiers[Tier.DRAM].kids_view
        passed: list[Entry] = []
        while line and block_count > 0:
            entry = line.popleft()
            # What was stored below it since, or stays there, needs it.
            may_go = self._holds(entry) and not kids[entry.node]
            going = evictable(entry.node, min(entry.count, block_count)) if may_go else 0
            if going and not entry.ready:
                entry.ready = self._is_stored(entry.node, entry.count)
                if not entry.ready:
                    passed.append(entry)
                    if len(passed) == ASK_COUNT_MAX:
                        break
                    continue
            block_count -= going
            if going and going < entry.count:
                entry.count -= going
                self._block_counts[pool] -= going
                passed.append(entry)
            else:
                self._leave(pool, entry)
                if 0 < going < self._copies(entry.node):
                    self._until_afresh[pool] = 0
            if going:
                yield self._rows(entry.node, going)
        line.extendleft(reversed(passed))

    # -- entries -------------------------------------------------------------------------------

    def _holds(self, entry: Entry) -> bool:
        """Whether the node is as it was chosen: not used since, and with as many copies at least."""
        return self._last_use(entry.node) == entry.used_at and self._copies(entry.node) >= entry.count

    def _copies(self, node: int) -> int:
        return self._state.catalog.tree.tiers[Tier.DRAM].copies_view[node]

    def _last_use(self, node: int) -> float:
        return self._state.catalog.tree.nodes.mv.last_use[node]

    def _rows(self, node: int, count: int) -> Rows:
        return self._state.catalog.tree.tail_rows(Tier.DRAM, node, count)

    def _is_stored(self, node: int, count: int) -> bool:
        tree = self._state.catalog.tree
        stored = tree.tiers[Tier.NVME].copies_view[node]
        if stored == 0 or stored == tree.nodes.mv.length[node]:
            return stored > 0
        slots = self._state.catalog.columns.slot[Tier.NVME]
        return bool((slots[self._rows(node, count)] != NO_SLOT).all())

    def _leave(self, pool: int, entry: Entry) -> None:
        self._in_line[entry.node] = False
        self._block_counts[pool] -= entry.count

    def _clear(self, pool: int) -> None:
        self._unstored.pop(pool, None)
        self._reached.pop(pool, None)
        for entry in self._lines.pop(pool):
            self._leave(pool, entry)
