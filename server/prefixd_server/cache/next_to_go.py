"""What DRAM drops next, chosen ahead of need so that it can be copied to NVMe first.

The policy chooses each node once and not again every tick: chosen nodes stand in
a line until they are dropped, used again, or changed. So the work of a tick
follows what was stored since the last one, and not how much is kept.

The line tells what to copy. What is dropped, and in which order, the policy says when
room is needed: of what may go without a loss (`ready`) the least important.

The simulator keeps such lines too. Not here: how much stands in line (scheduler.py),
and copying (transfers.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.clock import Clock
from prefixd_server.base.types import NO_ROW, NO_SLOT, Rows, Tier
from prefixd_server.base.views import Evictable
from prefixd_server.cache.state import Metered
from prefixd_server.catalog.columns import BlockColumns
from prefixd_server.catalog.nodes import NO_NODE
from prefixd_server.catalog.reserved import reserve
from prefixd_server.catalog.tree import PrefixTree
from prefixd_server.policy.policy import Policy, Victims

CHOICE_BLOCK_COUNT_MAX = 256
"""Blocks chosen in one step, about a millisecond of the loop."""
CHOICE_SHARE_MIN = 1 / 16
CHOICE_BLOCK_COUNT_MIN = 256
"""A line that is short by less than this part of it, and this many blocks, waits: a choice has its price."""
SWEEP_COUNT_MAX = 4
"""Nodes in line that are looked at in one step, whether they were used since."""
ASK_COUNT_MAX = 16
"""Nodes in line that are asked in one step whether they are stored."""
PASS_COUNT_MAX = 16
"""Nodes that one eviction leaves because they are still to be copied; then it drops rather than waits."""
AFRESH_EVERY = 16
"""Choices by age that go on where the last one ended, before one looks at what those left behind."""


class Kept(Protocol):
    """The catalog, as far as a line asks it."""

    @property
    def tree(self) -> PrefixTree:
        """What is kept, by node."""
        ...

    @property
    def columns(self) -> BlockColumns:
        """Where each block lies."""
        ...

    def evictable(self, tier: Tier) -> Evictable:
        """What may leave the tier now."""
        ...


class Chooser(Protocol):
    """The state, as far as a line needs it."""

    @property
    def catalog(self) -> Kept:
        """What is kept."""
        ...

    @property
    def policy(self) -> Policy:
        """Which chooses now."""
        ...

    @property
    def clock(self) -> Clock:
        """Its now()."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """The policy's."""
        ...

    @property
    def metered(self) -> list[Metered]:
        """Whose memory counts as metadata."""
        ...


@dataclass(slots=True)
class Entry:
    """A node in line.

    used_at: its last use when it was chosen; count: of its deepest copies. asked_from: the first row
    of its run that NVMe was asked to take; when that is still the first that NVMe has not, it was refused.
    settled: it may go. NVMe took it, or has better use for the room, at once or by now.
    """

    node: int
    used_at: float
    count: int
    asked_from: int = NO_ROW
    settled: bool = False


class NextToGo:
    """See the module. Owned by the event loop."""

    def __init__(self, state: Chooser) -> None:
        self._state = state
        node_count_max = state.catalog.tree.nodes.row_count_max
        self._in_line: NDArray[np.bool_] = reserve(np.bool_, node_count_max)
        self._lines: dict[int, dict[int, Entry]] = {}
        """By pool and node; those that were looked at longest ago first."""
        self._unstored: dict[int, deque[Entry]] = {}
        """Of those in line, the ones that are not settled."""
        self._planned: dict[int, list[Entry]] = {}
        """Those of the last plan, by the first row of each one's run that NVMe has not."""
        self._block_counts: dict[int, int] = {}
        self._reached: dict[int, tuple[int, float]] = {}
        """How far a policy that goes by age has come in each pool: the node, and when that was used."""
        self.giving: dict[int, int] = {}
        """Copies of a pool that go all at once, with a segment, and are to stand in line by then."""
        self._until_afresh: dict[int, int] = {}
        """Choices until the next that begins at the old end: at once when only a part of a node has gone."""
        self._chooser: Policy | None = None
        state.metered.append(self)

    # -- choosing ------------------------------------------------------------------------------

    def choose(self, pool: int, block_count: int) -> None:
        """Lengthens the line until it has `block_count` copies, by one step at most."""
        if self._chooser is not self._state.policy:
            self._chooser = self._state.policy
            for other in list(self._lines):
                self.clear(other)
        self.sweep(pool, SWEEP_COUNT_MAX)
        line = self._lines.setdefault(pool, {})
        short = block_count - self.block_count(pool)
        if short > 0 and short >= min(CHOICE_BLOCK_COUNT_MIN, CHOICE_SHARE_MIN * block_count):
            short = min(short, CHOICE_BLOCK_COUNT_MAX)
            for node, count in self._victims(pool, short):
                entry = line[node] = Entry(node, self._last_use(node), count)
                self._in_line[node] = True
                self._block_counts[pool] = self.block_count(pool) + count
                entry.settled = self._is_stored(node, count)
                if not entry.settled:
                    self._unstored.setdefault(pool, deque()).append(entry)

    def sweep(self, pool: int, node_count: int) -> None:
        """Looks at so many nodes, those that were looked at longest ago: what has changed leaves the line."""
        line = self._lines.get(pool, {})
        for entry in list(islice(line.values(), node_count)):
            if self._holds(entry):
                line[entry.node] = line.pop(entry.node)
            else:
                self._leave(pool, entry)

    def clear(self, pool: int) -> None:
        """Nothing of the pool stands in line any more."""
        self._unstored.pop(pool, None)
        self._reached.pop(pool, None)
        for entry in self._lines.pop(pool, {}).values():
            self._in_line[entry.node] = False
        self._block_counts.pop(pool, None)

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

    # -- copying -------------------------------------------------------------------------------

    def block_count(self, pool: int) -> int:
        """Copies in line, some of which have been used since."""
        return self._block_counts.get(pool, 0)

    def may_give(self, pool: int) -> bool:
        """Whether what is about to go stands in line, and NVMe has it or has better use for the room."""
        enough = self.giving.get(pool, 0) * (1 - CHOICE_SHARE_MIN)
        return self.block_count(pool) >= enough and not self.has_unstored(pool)

    def has_unstored(self, pool: int) -> bool:
        """Whether nodes in line are still to be asked about."""
        return bool(self._unstored.get(pool))

    def plan(self, pool: int, claimed: Container[int], block_count: int) -> list[Rows]:
        """About as many blocks that NVMe is to be asked to take: one array a space, parents first.

        What NVMe keeps outlives a restart, so it is whole: ancestors without a copy there come too.

        Args:
            claimed: rows on their way already.
        """
        catalog = self._state.catalog
        chosen: dict[int, dict[int, None]] = {}
        for rows in self.unstored(pool, claimed):
            fresh = [row for row in rows.tolist() if row not in claimed]
            space = catalog.tree.nodes.mv.space[catalog.columns.mv.node[int(rows[0])]]
            chosen.setdefault(space, {}).update(dict.fromkeys(fresh))
            block_count -= len(fresh)
            if block_count <= 0:
                break
        return [np.array(list(rows), dtype=np.int32) for rows in chosen.values() if rows]

    def unstored(self, pool: int, claimed: Container[int]) -> Iterator[Rows]:
        """Of nodes in line that NVMe has not, the rows to copy, parents first; some nodes at a time.

        Args:
            claimed: rows on their way already.
        """
        self._planned.clear()
        unstored = self._unstored.get(pool, deque())
        for _ in range(min(ASK_COUNT_MAX, len(unstored))):
            entry = unstored.popleft()
            if not self._holds(entry):
                continue
            entry.settled = self._is_stored(entry.node, entry.count)
            if entry.settled:
                continue
            deepest = int(self._rows(entry.node, 1)[0])
            rows = self._state.catalog.tree.path_without(Tier.NVME, deepest)
            first = int(rows[0])
            entry.settled = first == entry.asked_from and first not in claimed
            if not entry.settled:
                unstored.append(entry)
                self._planned.setdefault(first, []).append(entry)
                yield rows

    def asked(self, rows: Rows) -> None:
        """NVMe is asked to take these rows of the last plan; it is asked once."""
        for row in rows.tolist():
            for entry in self._planned.pop(row, ()):
                entry.asked_from = row

    # -- dropping ------------------------------------------------------------------------------

    def ready(self, pool: int) -> Evictable:
        """What may leave DRAM now, for one eviction: NVMe has it, or has better use for the room.

        It leaves a few nodes that are still to be copied; beyond them everything goes that may.
        """
        line = self._lines.get(pool, {})
        evictable = self._state.catalog.evictable(Tier.DRAM)
        left_count = 0

        def count(node: int, limit: int) -> int:
            nonlocal left_count
            going = evictable(node, limit)
            if going == 0 or left_count == PASS_COUNT_MAX or self._is_stored(node, going):
                return going
            entry = line.get(node)
            if entry is not None and entry.settled and self._holds(entry):
                return min(going, entry.count)
            left_count += 1
            return 0

        return count

    def spare(self, pool: int, count: int) -> Victims:
        """Up to so many copies that cost nothing to drop: NVMe has them. Of a few nodes in line."""
        evictable = self._state.catalog.evictable(Tier.DRAM)
        kids = self._state.catalog.tree.tiers[Tier.DRAM].kids_view
        victims: Victims = []
        for entry in islice(self._lines.get(pool, {}).values(), ASK_COUNT_MAX):
            # What was stored below it since, or stays there, needs it.
            if count > 0 and self._holds(entry) and not kids[entry.node]:
                going = evictable(entry.node, min(entry.count, count))
                if going and self._is_stored(entry.node, going):
                    victims.append((entry.node, going))
                    count -= going
        return victims

    def dropped(self, pool: int, node: int, count: int) -> None:
        """So many of the node's deepest copies leave DRAM now."""
        entry = self._lines.get(pool, {}).get(node)
        if count < self._copies(node):
            # What is left of it is as old as it was, and goes before what is newer.
            self._until_afresh[pool] = 0
        if entry is None:
            return
        if self._holds(entry) and count < entry.count:
            entry.count -= count
            self._block_counts[pool] -= count
        else:
            self._leave(pool, entry)

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
        del self._lines[pool][entry.node]
        self._in_line[entry.node] = False
        self._block_counts[pool] -= entry.count
