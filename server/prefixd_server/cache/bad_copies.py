"""A copy whose bytes are wrong is forgotten at once; its slot is held while somebody could write to it."""

from __future__ import annotations

from prefixd_server.base.types import Tier
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.sessions import Sessions
from prefixd_server.cache.state import BadSlot, State
from prefixd_server.catalog.events import CopyFoundBad


class BadCopies:
    """See the module."""

    def __init__(self, state: State, sessions: Sessions, endings: Endings) -> None:
        self._state = state
        self._sessions = sessions
        self._endings = endings

    def found(self, tenant: str, tier: Tier, slot: int) -> int:
        """Forgets a copy that was verified to be wrong; 1, or 0 when it was forgotten meanwhile."""
        table = self._state.catalog.slots[tier]
        if table.row[slot] < 0:
            return 0
        slot_bytes = table.slot_bytes_of(slot)
        self._state.apply(CopyFoundBad(tier, slot))
        self._state.counters_of(tenant).bad += 1
        if tier not in self._state.catalog.durable:
            witnesses = self._sessions.living_writers(tenant)
            self._state.bad_slots.append(BadSlot(tier, slot, slot_bytes, tenant, witnesses))
            self._endings.lift_unwitnessed()
        return 1
