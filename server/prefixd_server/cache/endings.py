"""How leases go on and end: renewed, released, expired, or with the process that held them (law 5).

Read slots in DRAM are free at once, since a reader verifies what it copied. Write
slots are free when their writer vouches for it (Commit, Abort) or is known dead;
until then they are quarantined. So are read slots in HBM: copies there go on by
themselves, and their blocks stay leased until the reader's word or death.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np

from prefixd_server.base.types import Tier
from prefixd_server.cache.sessions import Session
from prefixd_server.cache.state import State
from prefixd_server.catalog.events import CopiesReleased, SlotsLifted, WriterFailed
from prefixd_server.catalog.leases import ReadLease, ShardHold, WriteLease


class Endings:
    """Renews and ends leases; the only place that ends them."""

    def __init__(self, state: State) -> None:
        self._state = state

    def renew(self, session: Session, tokens: Iterable[bytes]) -> tuple[list[bytes], float]:
        """Renews leases of the session's instance. (tokens that are lost, new remaining life)."""
        ttl = self._state.limits.ttl_max_s
        expires_at = self._state.clock.now() + ttl
        lost = []
        for token in tokens:
            lease = self._state.leases.held_by(token, session.tenant, session.instance_id)
            if lease is None:
                lost.append(token)
            else:
                self._state.leases.renew(lease, expires_at)
        return lost, ttl

    def release_shards(self, lease: ReadLease, shards: Iterable[int], *, vouched: bool = True) -> None:
        """Lets go of some shards; the lease ends with its last.

        Args:
            vouched: their holders have said that nobody copies any more, or are dead. If not, what
                they hold in HBM is orphaned.
        """
        for shard in shards:
            hold = lease.shards.pop(shard, None)
            if hold is not None:
                for piece in hold.pieces:
                    if vouched or piece.tier is not Tier.HBM:
                        self._state.apply(CopiesReleased(piece.tier, piece.slots))
                if not vouched:
                    self._orphan(lease, shard, hold)
        if not lease.shards and lease.token in self._state.leases.reads:
            self._state.leases.end(lease)

    def _orphan(self, lease: ReadLease, shard: int, hold: ShardHold) -> None:
        """Keeps a shard's pieces in HBM leased."""
        pieces = tuple(piece for piece in hold.pieces if piece.tier is Tier.HBM)
        if pieces:
            orphans = self._state.leases.orphans
            kept = orphans.setdefault(lease.token, replace(lease, shards={}))
            kept.shards[shard] = ShardHold(hold.holder, pieces)

    def release_orphan(self, token: bytes, tenant: str, instance_id: str, shards: Iterable[int]) -> bool:
        """The word of a lease's holders that came after its end; whether something waited for it."""
        orphan = self._state.leases.orphans.get(token)
        if orphan is None or (orphan.tenant, orphan.instance_id) != (tenant, instance_id):
            return False
        self.release_shards(orphan, list(shards) or list(orphan.shards))
        if not orphan.shards:
            del self._state.leases.orphans[token]
        return True

    def abort(self, lease: WriteLease, count: int | None = None) -> int:
        """The writer vouches that it has stopped: slots freed, its last `count` or all of them.

        The lease ends with its last slot.
        """
        slots = lease.open_slots if count is None else lease.open_slots[-count:]
        if lease.quarantined:
            self._state.apply(SlotsLifted(lease.tier, slots))
        else:
            self._state.apply(WriterFailed(lease.tier, slots, quarantine=False))
        lease.slots = lease.slots[: len(lease.slots) - len(slots)]
        if len(lease.open_slots) == 0:
            self._state.leases.end(lease)
        return len(slots)

    def quarantine(self, lease: WriteLease) -> None:
        """Nobody vouches: the blocks are forgotten, the slots wait for the process's death."""
        self._state.apply(WriterFailed(lease.tier, lease.open_slots, quarantine=True))
        lease.quarantined = True

    def expire(self, now: float, count_max: int | None = None) -> int:
        """Ends or quarantines leases whose time is over, at most so many; how many."""
        count = 0
        for lease in islice(self._state.leases.expired(now), count_max):
            count += 1
            if isinstance(lease, ReadLease):
                self.release_shards(lease, list(lease.shards), vouched=False)
            else:
                self.quarantine(lease)
        return count

    def session_ended(self, session: Session, instance_is_open: bool) -> None:
        """Gives up what the session held, and with the instance's last session all of the instance's."""
        for read in list(self._state.leases.reads.values()):
            if (read.tenant, read.instance_id) == (session.tenant, session.instance_id):
                held = [
                    shard
                    for shard, hold in read.shards.items()
                    if not instance_is_open or hold.holder == session.session_id
                ]
                self.release_shards(read, held, vouched=session.dead)
        for write in list(self._state.leases.writes.values()):
            if write.session_id == session.session_id and not write.quarantined:
                if session.dead:
                    self.abort(write)
                else:
                    self.quarantine(write)

    def process_died(self, session: Session) -> None:
        """The proof: nothing of this process can write any more."""
        for write in list(self._state.leases.writes.values()):
            if write.session_id == session.session_id:
                self.abort(write)
        for orphan in list(self._state.leases.orphans.values()):
            held = [shard for shard, hold in orphan.shards.items() if hold.holder == session.session_id]
            if held:
                self.release_orphan(orphan.token, orphan.tenant, orphan.instance_id, held)
        self._forget_witness(session.session_id)

    def has_quarantine(self, session: Session) -> bool:
        """Whether slots wait for this session's process."""
        leases, name = self._state.leases, session.session_id
        orphaned = (hold for orphan in leases.orphans.values() for hold in orphan.shards.values())
        return (
            any(w.quarantined and w.session_id == name for w in leases.writes.values())
            or any(hold.holder == name for hold in orphaned)
            or any(name in bad.witnesses for bad in self._state.bad_slots)
        )

    def _forget_witness(self, session_id: bytes) -> None:
        for bad in self._state.bad_slots:
            bad.witnesses.discard(session_id)
        self.lift_unwitnessed()

    def lift_unwitnessed(self) -> None:
        """Frees bad slots that no living process can write to."""
        lifted: dict[Tier, list[int]] = {}
        for bad in self._state.bad_slots:
            if not bad.witnesses:
                lifted.setdefault(bad.tier, []).append(bad.slot)
        if lifted:
            self._state.bad_slots = [bad for bad in self._state.bad_slots if bad.witnesses]
            for tier, slots in lifted.items():
                self._state.apply(SlotsLifted(tier, np.array(slots, dtype=np.uint32)))
