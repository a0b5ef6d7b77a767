"""Leases: who holds which slots until when. Pure bookkeeping, owned by the event loop.

A read lease belongs to an engine instance; each of its shards has one holder at
a time, a session: first the one that acquired, then the worker that redeemed
it. A write lease belongs to one process. A write lease that ends other than by
Commit or Abort is *quarantined*: its slots wait for the proof that nobody can
write to them any more (DESIGN law 5).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from prefixd_server.base.errors import NotFound, StateConflict
from prefixd_server.base.types import Slots, Tier
from prefixd_server.catalog.namespaces import Namespace

TOKEN_BYTES = 16
FORESTALLED_COUNT_MAX = 4096
"""Tokens per tenant."""


@dataclass(frozen=True, slots=True)
class LeasedPiece:
    """Consecutive blocks of one shard and KV group in one tier, from `first_block` of the run on."""

    kv_group: int
    tier: Tier
    first_block: int
    slots: Slots


@dataclass(slots=True)
class ShardHold:
    """One open shard of a read lease. `holder` is a session id."""

    holder: bytes
    pieces: tuple[LeasedPiece, ...]


@dataclass(slots=True)
class ReadLease:
    """From Acquire. Times are monotonic seconds, taken_at_wall is for people."""

    token: bytes
    tenant: str
    instance_id: str
    pid: int
    namespace: Namespace
    taken_at_wall: float
    expires_at: float
    shards: dict[int, ShardHold]

    @property
    def slot_count(self) -> int:
        """Slots still held."""
        return sum(len(piece.slots) for hold in self.shards.values() for piece in hold.pieces)


@dataclass(slots=True)
class WriteLease:
    """From Reserve. slots[:committed_count] are committed and no longer held."""

    token: bytes
    tenant: str
    instance_id: str
    session_id: bytes
    pid: int
    namespace: Namespace
    shard: int
    kv_group: int
    tier: Tier
    slots: Slots
    taken_at_wall: float
    expires_at: float
    committed_count: int = 0
    quarantined: bool = False

    @property
    def open_slots(self) -> Slots:
        """Slots not committed yet."""
        return self.slots[self.committed_count :]


@dataclass(slots=True)
class LeaseTable:
    """Every live lease, by token; every quarantined write lease; and what ended reads leave in HBM.

    An orphan is a read lease that ended without its holders' word: of each shard the HBM pieces are left,
    still counted as leased, until the holder's word or death.
    """

    reads: dict[bytes, ReadLease] = field(default_factory=dict)
    writes: dict[bytes, WriteLease] = field(default_factory=dict)
    orphans: dict[bytes, ReadLease] = field(default_factory=dict)
    forestalled: dict[str, dict[bytes, None]] = field(default_factory=dict)
    """By tenant, the last unknown tokens that were to be ended, oldest first: their calls may yet come."""
    _expiries: list[tuple[float, bytes]] = field(default_factory=list)

    def add(self, lease: ReadLease | WriteLease) -> None:
        """Takes a new lease; its expiry is watched from now on."""
        if isinstance(lease, ReadLease):
            self.reads[lease.token] = lease
        else:
            self.writes[lease.token] = lease
        heapq.heappush(self._expiries, (lease.expires_at, lease.token))

    def forestall(self, tenant: str, token: bytes) -> None:
        """The end of an unknown lease: a call that would begin it is refused from now on."""
        tokens = self.forestalled.setdefault(tenant, {})
        tokens[token] = None
        if len(tokens) > FORESTALLED_COUNT_MAX:
            del tokens[next(iter(tokens))]

    def refuse_used(self, tenant: str, token: bytes) -> None:
        """Whether a caller may choose this token. Raises StateConflict LEASE_TOKEN_USED."""
        known = token in self.reads or token in self.writes or token in self.orphans
        if known or token in self.forestalled.get(tenant, ()):
            raise StateConflict(
                "LEASE_TOKEN_USED",
                f"token {token[:4].hex()}... names a lease, or one that its caller has ended before it "
                "began; choose 16 random bytes for each call, or leave it empty",
                field="token",
                value=token[:4].hex(),
            )

    def read(self, token: bytes, tenant: str, instance_id: str) -> ReadLease:
        """The instance's live read lease. Raises NotFound LEASE_UNKNOWN, also for another's."""
        lease = self.reads.get(token)
        if lease is None or lease.tenant != tenant or lease.instance_id != instance_id:
            raise lease_unknown(token)
        return lease

    def write(self, token: bytes, tenant: str, instance_id: str, pid: int) -> WriteLease:
        """The process's write lease, quarantined ones included. Raises NotFound LEASE_UNKNOWN."""
        lease = self.writes.get(token)
        if lease is None or (lease.tenant, lease.instance_id, lease.pid) != (tenant, instance_id, pid):
            raise lease_unknown(token)
        return lease

    def held_by(self, token: bytes, tenant: str, instance_id: str) -> ReadLease | WriteLease | None:
        """The instance's live lease, None when it has ended, is quarantined or is another's."""
        lease = self.reads.get(token) or self.writes.get(token)
        if lease is None or (lease.tenant, lease.instance_id) != (tenant, instance_id):
            return None
        return None if isinstance(lease, WriteLease) and lease.quarantined else lease

    def renew(self, lease: ReadLease | WriteLease, expires_at: float) -> None:
        """Moves the expiry; the old entry of the heap is recognised as outdated later."""
        if expires_at > lease.expires_at:
            lease.expires_at = expires_at
            heapq.heappush(self._expiries, (expires_at, lease.token))

    def expired(self, now: float) -> Iterator[ReadLease | WriteLease]:
        """Leases whose time is over, each once. The consumer ends or quarantines each."""
        while self._expiries and self._expiries[0][0] <= now:
            _, token = heapq.heappop(self._expiries)
            lease = self.reads.get(token) or self.writes.get(token)
            if lease is None or lease.expires_at > now:
                continue
            if isinstance(lease, WriteLease) and lease.quarantined:
                continue
            yield lease

    def end(self, lease: ReadLease | WriteLease) -> None:
        """Forgets a lease that holds nothing any more."""
        if isinstance(lease, ReadLease):
            del self.reads[lease.token]
        else:
            del self.writes[lease.token]

    def of_tenant(self, tenant: str | None) -> list[ReadLease | WriteLease]:
        """Leases of one tenant, or all, oldest first."""
        every: list[ReadLease | WriteLease] = [*self.reads.values(), *self.writes.values()]
        chosen = [lease for lease in every if tenant is None or lease.tenant == tenant]
        return sorted(chosen, key=lambda lease: lease.taken_at_wall)

    def live_count(self, tenant: str | None = None) -> int:
        """Live leases, quarantined ones not counted."""
        if tenant is None:
            return len(self.reads) + sum(not w.quarantined for w in self.writes.values())
        reads = sum(r.tenant == tenant for r in self.reads.values())
        return reads + sum(w.tenant == tenant and not w.quarantined for w in self.writes.values())


def lease_unknown(token: bytes) -> NotFound:
    """One error for tokens that never were, have ended, or are another's."""
    return NotFound(
        "LEASE_UNKNOWN",
        f"no lease {token[:4].hex()}... for this engine instance; it has ended or expired: acquire again",
        field="token",
        value=token[:4].hex(),
    )
