"""What prefetches hold in DRAM until it is asked for, and what became of it.

A slot that a prefetch holds is leased, so nothing evicts it. Bytes that a prefetch
has brought are used when an engine leases them, and useless when the last hold on
them ends before: brought = used + useless + waiting, at every moment.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.traffic import PrefetchCounters
from prefixd_server.base.types import NO_SLOT, Slots, Tier
from prefixd_server.cache.state import State
from prefixd_server.catalog.events import CopiesLeased, CopiesReleased
from prefixd_server.catalog.passes import Steps, named, stretches


class PrefetchHolds:
    """See the module.

    Args:
        share_max: part of a pool's slots that may be held, 0 to 1.
    """

    def __init__(self, state: State, share_max: float) -> None:
        self._state = state
        self._share_max = share_max
        table = state.catalog.slots[Tier.DRAM]
        self._holds: NDArray[np.uint16] = np.zeros(len(table.state), dtype=np.uint16)
        """Prefetches that hold the slot."""
        self._unused: NDArray[np.bool_] = np.zeros(len(table.state), dtype=np.bool_)
        """Brought by a prefetch, and not leased by an engine since."""
        self._held_count: dict[int, int] = {}
        self.counters = PrefetchCounters()

    def room(self, pool: int) -> int:
        """Slots of the pool that may be held beside those that are."""
        count = self._state.catalog.slots[Tier.DRAM].slot_count(pool)
        return max(0, int(count * self._share_max) - self._held_count.get(pool, 0))

    def hold(self, pool: int, slots: Slots) -> None:
        """Holds resident slots, once more where they are held already."""
        self._state.apply(CopiesLeased(Tier.DRAM, slots))
        self._holds[slots] += np.uint16(1)
        self._held_count[pool] = self._held_count.get(pool, 0) + len(slots)

    def let_go(self, pool: int, slots: Slots) -> None:
        """Ends one hold on each of the slots."""
        self._held_count[pool] -= len(slots)
        self._holds[slots] -= np.uint16(1)
        useless = slots[self._unused[slots] & (self._holds[slots] == 0)]
        self._unused[useless] = False
        self.counters.useless_bytes += self._bytes_of(useless)
        self._state.apply(CopiesReleased(Tier.DRAM, slots))

    def brought(self, slots: Slots, awaited: bool) -> None:
        """Slots that a prefetch has filled; those that it could not hold are useless at once.

        Args:
            awaited: an engine waits for them: they are used.
        """
        size_bytes = self._bytes_of(slots)
        self.counters.brought_bytes += size_bytes
        if awaited:
            self.counters.used_bytes += size_bytes
            return
        held = slots[self._holds[slots] > 0]
        self._unused[held] = True
        self.counters.useless_bytes += size_bytes - self._bytes_of(held)

    def leased(self, slots: Slots) -> None:
        """An engine has leased DRAM slots."""
        used = slots[self._unused[slots]]
        if len(used):
            self._unused[used] = False
            self.counters.used_bytes += self._bytes_of(used)

    def unused_count(self, slots: Slots) -> int:
        """Of these slots, NO_SLOT among them, those that were brought and that no engine has leased yet."""
        return int(self._unused[slots[slots != NO_SLOT]].sum())

    def steps(self) -> Steps:
        """What is wrong, in words (catalog/passes.py): the identity above, and that what waits is held."""
        table = self._state.catalog.slots[Tier.DRAM]
        waiting_bytes = 0
        for segment in range(table.segment_count):
            record = table.segment(segment)
            waiting_bytes += record.slot_bytes * int(np.count_nonzero(self._unused[table.slots_in(segment)]))
        yield named(
            waiting_bytes != self.waiting_bytes,
            "prefetch: brought bytes differ from used + useless + waiting",
        )
        yield named(
            int(self._holds.sum()) != sum(self._held_count.values()), "prefetch: holds are miscounted"
        )
        for first, end in stretches(len(self._holds), 1 << 16):
            holds = self._holds[first:end]
            yield [
                *named(
                    self._unused[first:end] & (holds == 0), "prefetch: bytes wait in slots that nothing holds"
                ),
                *named(table.leases[first:end] < holds, "prefetch: a slot is held and not leased"),
            ]

    @property
    def waiting_bytes(self) -> int:
        """Brought, held, and not used yet."""
        counters = self.counters
        return counters.brought_bytes - counters.used_bytes - counters.useless_bytes

    def _bytes_of(self, slots: Slots) -> int:
        """Bytes of slots of one size."""
        if len(slots) == 0:
            return 0
        return len(slots) * self._state.catalog.slots[Tier.DRAM].slot_bytes_of(int(slots[0]))
