"""The way out: lookup, acquire, redeem.

Lookup and acquire walk the same steps: find the rows of every shard and KV
group, take the longest prefix that all of them can serve, and tell where it
lies. Acquire adds a lease and counts one use. Not here: release (releasing.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.errors import LimitReached, NotFound
from prefixd_server.base.runs import leading
from prefixd_server.base.types import (
    Acquired,
    DeviceSegment,
    Extent,
    Hashes,
    LeaseGrant,
    NamespaceRef,
    Redeemed,
    Rows,
    RunHits,
    ShardExtents,
    Tier,
)
from prefixd_server.base.work import Errand, Reason, Urgency
from prefixd_server.cache.hbm_placement import HbmPlacement
from prefixd_server.cache.prefetching import Prefetching
from prefixd_server.cache.reach import ReachOf, all_stored, every_engines, on_devices
from prefixd_server.cache.sessions import Session, Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.transfers import Transfers
from prefixd_server.cache.workload import Workload
from prefixd_server.catalog.events import CopiesLeased, CopiesReleased
from prefixd_server.catalog.leases import TOKEN_BYTES, LeasedPiece, ReadLease, ShardHold
from prefixd_server.catalog.namespaces import Namespace

WARM_BYTES = 32 << 20
WARM_BLOCK_COUNT_MIN = 4
"""How much of a cold run is brought at once, per shard and KV group."""
NO_ROWS = np.zeros(0, dtype=np.int32)
HOT_WINDOW_COUNT = 8
"""As many times that much of one that will be used again soon."""


@dataclass(frozen=True, slots=True)
class Found:
    """A run as found: rows per (shard, kv_group), and the tier index of every hit block."""

    rows: dict[tuple[int, int], Rows]
    hit_count: int
    known_count: int
    tiers: NDArray[np.uint8]
    reach_of: ReachOf
    """Whose copies count."""

    @property
    def is_pending(self) -> bool:
        """Whether blocks behind the hit are known, and cannot be read yet."""
        return self.known_count > self.hit_count

    def run(self, asked: int) -> RunHits:
        """hits + pending + misses = asked."""
        pieces = _pieces(self.tiers[: self.hit_count])
        return RunHits(
            tuple((tier, last - first) for tier, first, last in pieces),
            self.known_count - self.hit_count,
            asked - self.known_count,
        )


class Reading:
    """See the module."""

    def __init__(
        self,
        state: State,
        sessions: Sessions,
        transfers: Transfers | None,
        workload: Workload,
        prefetching: Prefetching,
        hbm: HbmPlacement | None = None,
    ) -> None:
        self._hbm = hbm
        self._state = state
        self._sessions = sessions
        self._transfers = transfers
        self._workload = workload
        self._prefetching = prefetching

    def lookup(self, tenant: str, ref: NamespaceRef, hashes: Hashes) -> RunHits:
        """What would hit; changes nothing."""
        namespace = self._state.catalog.namespaces.get(tenant, ref)
        return self._find(namespace, hashes, namespace.spec.parts, all_stored).run(len(hashes))

    async def wait_for(
        self, tenant: str, ref: NamespaceRef, hashes: Hashes, max_wait_s: float, session_id: bytes = b""
    ) -> None:
        """Waits until all of the run that is stored can be read, or until the time is over.

        session_id is whose reading counts; without one, what every engine can read.
        """
        readable = self._readable(self._sessions.get(tenant, session_id) if session_id else None)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_s
        while True:
            namespace = self._state.catalog.namespaces.get(tenant, ref)
            found = self._find(namespace, hashes, namespace.spec.parts, readable)
            if not found.is_pending:
                return
            with self._kept(found):
                coming = self._warm(found)
            remaining = deadline - loop.time()
            if not coming or remaining <= 0:
                return
            await asyncio.wait(coming, timeout=remaining)

    def acquire(
        self,
        tenant: str,
        session_id: bytes,
        ref: NamespaceRef,
        hashes: Hashes,
        skip_count: int,
        redeem_shards: tuple[int, ...],
        ttl_s: float | None,
        request_id: str = "",
        token: bytes = b"",
    ) -> Acquired:
        """Leases the longest resident prefix beyond `skip_count`, for all shards at once.

        Args:
            token: the lease's, as its caller has chosen it; empty: a random one.
        """
        self._state.refuse_when_draining()
        session = self._sessions.get(tenant, session_id)
        namespace = self._state.catalog.namespaces.get(tenant, ref)
        self._state.leases.refuse_used(tenant, token)
        found = self._find(namespace, hashes, namespace.spec.parts, self._readable(session))
        run = found.run(len(hashes))
        self.count(tenant, run)
        if found.is_pending:
            with self._kept(found):
                self._warm(found)
                self._warm_hot(found)
        if self._hbm is not None:
            runs = ((shard, rows[: found.hit_count]) for (shard, _), rows in found.rows.items())
            self._hbm.consider(session, runs)
        self._workload.used((tenant, session.instance_id, request_id), namespace, hashes, found.rows)
        if found.hit_count <= skip_count:
            self._prefetching.acquired(session, namespace, hashes, request_id, None)
            return Acquired(run, None)
        if self._state.leases.live_count(tenant) >= self._state.quotas.leases(tenant):
            raise _too_many_leases(self._state.quotas.leases(tenant))
        ttl = self._state.lease_ttl_s(ttl_s)
        lease = self._lease(session, namespace, found, skip_count, ttl, token)
        self._prefetching.acquired(session, namespace, hashes, request_id, lease)
        extents = tuple(e for shard in redeem_shards for e in self._extents(lease, shard))
        return Acquired(run, LeaseGrant(lease.token, ttl), extents, self._devices(session, extents))

    def redeem(self, tenant: str, session_id: bytes, token: bytes, shard: int) -> Redeemed:
        """Hands one shard of a lease to a worker of the same instance."""
        session = self._sessions.get(tenant, session_id)
        lease = self._state.leases.read(token, tenant, session.instance_id)
        hold = lease.shards.get(shard)
        if hold is None or self._forgotten(hold) or not self._can_redeem(session, shard, hold):
            raise NotFound(
                "SHARD_NOT_LEASED",
                f"shard {shard} of this lease was released, its blocks were forgotten, they lie on a "
                "device that this session has not named, or it is out of range; acquire again",
                field="shard",
                value=shard,
            )
        hold.holder = session.session_id
        remaining = max(0.0, lease.expires_at - self._state.clock.now())
        extents = tuple(self._extents(lease, shard))
        return Redeemed(LeaseGrant(token, remaining), extents, self._devices(session, extents))

    def find(self, tenant: str, ref: NamespaceRef, hashes: Hashes) -> Found:
        """The run as every engine of the node could read it."""
        namespace = self._state.catalog.namespaces.get(tenant, ref)
        return self._find(namespace, hashes, namespace.spec.parts)

    def find_one(self, namespace: Namespace, shard: int, kv_group: int, hashes: Hashes) -> Found:
        """The run as one shard and KV group has it."""
        return self._find(namespace, hashes, [(shard, kv_group)])

    def count(self, tenant: str, run: RunHits) -> None:
        """Books what was asked for: hits per tier + pending + misses = asked."""
        counters = self._state.counters_of(tenant)
        for tier, blocks in run.hits:
            counters.hits[tier] += blocks
            counters.asked += blocks
        counters.pending += run.pending_count
        counters.missed += run.miss_count
        counters.asked += run.pending_count + run.miss_count

    # -- devices -------------------------------------------------------------------------------

    def _readable(self, session: Session | None) -> ReachOf:
        """What the session can read, or whoever redeems its leases."""
        if self._hbm is None or session is None or not session.readable_devices:
            return every_engines
        tier = self._hbm.tier
        return lambda shard: on_devices(tier.of_shard(session, shard))

    def _can_redeem(self, session: Session, shard: int, hold: ShardHold) -> bool:
        """Whether it can read all of the shard, which is remembered."""
        devices: tuple[int, ...] = ()
        if self._hbm is not None:
            self._hbm.tier.redeemed(session, shard)
            devices = self._hbm.tier.named(session)
        reach, catalog = on_devices(devices), self._state.catalog
        return all(reach.includes(catalog, piece.tier, piece.slots) for piece in hold.pieces)

    def _devices(self, session: Session, shards: tuple[ShardExtents, ...]) -> tuple[DeviceSegment, ...]:
        """The segments in GPU memory among the extents."""
        if self._hbm is None:
            return ()
        return self._hbm.tier.device_segments(session, [e for shard in shards for e in shard.extents])

    # -- steps ---------------------------------------------------------------------------------

    @contextmanager
    def _kept(self, found: Found) -> Iterator[None]:
        """Leases what DRAM has of the run, so that room made meanwhile is not made of it.

        Copies in other tiers need no lease: room is made in DRAM alone.
        """
        catalog = self._state.catalog
        rows = np.concatenate([part[: found.known_count] for part in found.rows.values()])
        slots = catalog.columns.slot[Tier.DRAM][rows[catalog.resident(Tier.DRAM, rows)]]
        self._state.apply(CopiesLeased(Tier.DRAM, slots))
        try:
            yield
        finally:
            self._state.apply(CopiesReleased(Tier.DRAM, slots))

    def _warm(self, found: Found) -> list[asyncio.Future[None]]:
        """Starts to bring the first blocks that are stored and not readable; what to wait for.

        A window at a time: the first blocks of a cold run at once, the rest when they are asked for again.
        """
        coming: list[asyncio.Future[None]] = []
        for (shard, _), rows in found.rows.items():
            first = rows[found.hit_count : found.known_count][: self._window(rows)]
            if self._transfers is not None:
                coming += self._transfers.promote(first, Errand(Urgency.DEMAND, Reason.DEMANDED))
            if self._hbm is not None:
                slots = self._state.catalog.columns.slot[Tier.HBM][first]
                far = first[~self._hbm.tier.on(found.reach_of(shard).devices or (), slots)]
                coming += self._hbm.transfers.demote(far, Errand(Urgency.DEMAND, Reason.DEMANDED))
        return coming

    def _warm_hot(self, found: Found) -> None:
        """Brings what lies behind the first blocks in the background, where it will be used again soon."""
        if self._transfers is None:
            return
        for rows in found.rows.values():
            window = self._window(rows)
            rest = rows[found.hit_count : found.known_count][window : HOT_WINDOW_COUNT * window]
            if len(rest):
                self._transfers.promote_hot(rest)

    def _window(self, rows: Rows) -> int:
        """Blocks that are brought at once."""
        return max(WARM_BLOCK_COUNT_MIN, WARM_BYTES // self._state.catalog.slot_bytes_of_row(int(rows[0])))

    def _find(
        self,
        namespace: Namespace,
        hashes: Hashes,
        parts: list[tuple[int, int]],
        reach_of: ReachOf = every_engines,
    ) -> Found:
        """The longest prefix that every part, a (shard, kv_group), has in reach."""
        catalog = self._state.catalog
        hit = known = len(hashes)
        rows_of: dict[tuple[int, int], Rows] = {}
        tiers = np.zeros(0, dtype=np.uint8)
        for shard, group in parts:
            if known == 0:
                rows_of[shard, group] = NO_ROWS
                continue
            space = catalog.namespaces.space(namespace, shard, group)
            rows = catalog.find_prefix(space, hashes[:known])
            known = len(rows)
            tier = reach_of(shard).tier_of(catalog, rows)
            servable = tier != 0
            if catalog.waiting_count:
                # Otherwise every readable copy is visible: only waiting blocks are whole and hidden.
                servable &= catalog.visible(rows)
            hit = min(hit, leading(servable))
            tiers = np.maximum(tiers[:known], tier) if rows_of else tier
            rows_of[shard, group] = rows
        return Found(rows_of, hit, known, tiers[:known], reach_of)

    def _lease(
        self, session: Session, namespace: Namespace, found: Found, skip: int, ttl_s: float, token: bytes
    ) -> ReadLease:
        shards: dict[int, list[LeasedPiece]] = {}
        for (shard, group), rows in found.rows.items():
            wanted = rows[skip : found.hit_count]
            for tier, first, last in _pieces(found.reach_of(shard).tier_of(self._state.catalog, wanted)):
                slots = self._state.catalog.columns.slot[tier][wanted[first:last]]
                self._state.apply(CopiesLeased(tier, slots))
                shards.setdefault(shard, []).append(LeasedPiece(group, tier, skip + first, slots))
        lease = ReadLease(
            token=token or secrets.token_bytes(TOKEN_BYTES),
            tenant=session.tenant,
            instance_id=session.instance_id,
            pid=session.pid,
            namespace=namespace,
            taken_at_wall=self._state.clock.wall(),
            expires_at=self._state.clock.now() + ttl_s,
            shards={shard: ShardHold(session.session_id, tuple(pieces)) for shard, pieces in shards.items()},
        )
        self._state.leases.add(lease)
        return lease

    def _forgotten(self, hold: ShardHold) -> bool:
        """Whether a block of the hold was forgotten after it was leased."""
        slots = self._state.catalog.slots
        return any((slots[piece.tier].row[piece.slots] < 0).any() for piece in hold.pieces)

    def _extents(self, lease: ReadLease, shard: int) -> list[ShardExtents]:
        hold = lease.shards.get(shard)
        if hold is None:
            return []
        catalog = self._state.catalog
        by_group: dict[int, list[LeasedPiece]] = {}
        for piece in hold.pieces:
            by_group.setdefault(piece.kv_group, []).append(piece)
        answers = []
        for group, pieces in sorted(by_group.items()):
            extents: list[Extent] = []
            for piece in pieces:
                table = catalog.slots[piece.tier]
                checksums = catalog.columns.checksum[table.row[piece.slots]]
                extents.extend(table.extents(piece.slots, checksums, piece.first_block))
            answers.append(ShardExtents(shard, group, tuple(extents)))
        return answers


def _pieces(tiers: NDArray[np.uint8]) -> list[tuple[Tier, int, int]]:
    """Consecutive blocks of one tier as (tier, first, end)."""
    if len(tiers) and tiers[0] == tiers[-1] and (tiers == tiers[0]).all():
        return [(Tier(int(tiers[0])), 0, len(tiers))]
    edges = [0, *(np.flatnonzero(tiers[1:] != tiers[:-1]) + 1).tolist(), len(tiers)]
    return [(Tier(int(tiers[a])), a, b) for a, b in pairwise(edges) if b > a]


def _too_many_leases(limit: int) -> LimitReached:
    return LimitReached(
        "LEASE_LIMIT",
        f"the tenant holds {limit} leases; release some, or raise its lease_count_max or "
        "leases.lease_count_max",
        limit=limit,
    )
