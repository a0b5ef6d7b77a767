"""The way in: reserve, commit, abort."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from prefixd_server.base.errors import InvalidRequest, StateConflict
from prefixd_server.base.runs import leading
from prefixd_server.base.types import (
    NO_ROW,
    Checksums,
    Committed,
    DeclineReason,
    Hashes,
    LeaseGrant,
    NamespaceRef,
    Reserved,
    Rows,
    Slots,
    Tier,
)
from prefixd_server.cache.admitted import Admitted, chain_mismatch, refuse_repeats
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.hbm_device import HbmDevice
from prefixd_server.cache.hbm_tier import HbmTier
from prefixd_server.cache.room import Room
from prefixd_server.cache.sessions import Session, Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.turns import Turns
from prefixd_server.cache.workload import Workload
from prefixd_server.catalog.columns import COMMITTED, VISIBLE
from prefixd_server.catalog.events import BlocksCommitted, BlocksReserved
from prefixd_server.catalog.leases import TOKEN_BYTES, WriteLease, lease_unknown
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.policy.importance import Newcomers

BLOCKS_AT_ONCE = 512
"""Blocks that are reserved in one step: half a millisecond, one where others have to go."""
ABORTED_AT_ONCE = 1024
NO_SLOTS: Slots = np.zeros(0, np.uint32)


class Writing:
    """See the module."""

    def __init__(
        self,
        state: State,
        sessions: Sessions,
        endings: Endings,
        room: Room,
        workload: Workload,
        hbm: HbmTier | None = None,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._endings = endings
        self._room = room
        self._workload = workload
        self._hbm = hbm

    def reserve(
        self,
        tenant: str,
        session_id: bytes,
        ref: NamespaceRef,
        shard: int,
        kv_group: int,
        parent: Hashes | None,
        hashes: Hashes,
        ttl_s: float | None,
        recompute_cost_s: float | None = None,
        wanted: Tier = Tier.DRAM,
        token: bytes = b"",
    ) -> Turns[Reserved]:
        """Slots for the blocks of a run that are not kept yet; outcomes for all of them.

        A long run takes a turn for BLOCKS_AT_ONCE. What is wrong with it, or an end between two turns,
        gives back what it had got.

        Args:
            recompute_cost_s: the engine's hint of what recomputing the whole run would cost.
            wanted: HBM for slots there, when there is room for all and the session can write to them.
            token: the lease's, as its caller has chosen it; empty: a random one.
        """
        if len(hashes) > BLOCKS_AT_ONCE:
            yield  # To read so many was a step of its own.
        self._state.refuse_when_draining()
        session = self._sessions.writer(tenant, session_id)
        namespace = self._state.catalog.namespaces.get(tenant, ref)
        self._state.leases.refuse_used(tenant, token)
        if recompute_cost_s is not None:
            first = self._depth_below(namespace, shard, kv_group, parent) * namespace.spec.block_tokens
            tokens = len(hashes) * namespace.spec.block_tokens
            self._state.costs.measured(namespace, first, tokens, recompute_cost_s)
        hbm = self._hbm if wanted is Tier.HBM else None
        device = None if hbm is None else hbm.device_of_shard(session, shard)
        ttl = self._state.lease_ttl_s(ttl_s)
        lease: WriteLease | None = None
        try:
            for admitted in self._admit_parts(namespace, shard, kv_group, parent, hashes, device):
                if lease is not None:
                    lease.slots = admitted.slots
                elif len(admitted.slots):
                    lease = self._lease(session, namespace, shard, kv_group, admitted, ttl, token)
                if len(admitted.known) + len(admitted.slots) + admitted.declined_count < len(hashes):
                    yield
                    self._go_on(lease, namespace, token)
        except BaseException:
            if lease is not None and self._state.leases.writes.get(lease.token) is lease:
                self._endings.abort(lease)
            raise
        self._state.counters_of(tenant).declined += admitted.declined_count
        outcomes = admitted.outcomes()
        if lease is None:
            return Reserved(None, outcomes, (), admitted.reason, admitted.retry_after_s)
        extents = self._state.catalog.slots[lease.tier].extents(lease.slots, None, len(admitted.known))
        segments = () if self._hbm is None else self._hbm.device_segments(session, extents)
        return Reserved(
            LeaseGrant(lease.token, ttl), outcomes, extents, admitted.reason, admitted.retry_after_s, segments
        )

    def _go_on(self, lease: WriteLease | None, namespace: Namespace, token: bytes) -> None:
        """Others have had a turn: raises what ends the call."""
        self._state.catalog.namespaces.get(namespace.tenant, namespace.ref)
        if lease is None:
            self._state.leases.refuse_used(namespace.tenant, token)
        elif lease.quarantined or lease.token not in self._state.leases.writes:
            raise lease_unknown(lease.token)

    def commit(
        self, tenant: str, session_id: bytes, token: bytes, committed_before: int, checksums: Checksums
    ) -> Committed:
        """Publishes the next blocks of a lease, in order."""
        session = self._sessions.get(tenant, session_id)
        lease = self._state.leases.write(token, tenant, session.instance_id, session.pid)
        if lease.quarantined:
            raise StateConflict(
                "LEASE_EXPIRED",
                "the write lease expired before this Commit, its blocks are forgotten; call Abort once "
                "nobody in this process writes to its slots, then reserve again",
                field="token",
            )
        self._state.catalog.namespaces.get(tenant, lease.namespace.ref)
        _check_order(lease, committed_before, len(checksums))
        end = lease.committed_count + len(checksums)
        slots = lease.slots[lease.committed_count : end]
        done = self.publish(tenant, slots, checksums, lease.tier)
        lease.committed_count = end
        if end == len(lease.slots):
            self._state.leases.end(lease)
        return done

    def publish(self, tenant: str, slots: Slots, checksums: Checksums, tier: Tier = Tier.DRAM) -> Committed:
        """Commits reserved slots and counts them."""
        effect = self._state.apply(BlocksCommitted(tier, slots, checksums))
        visible = min(effect.visible_count, len(slots))
        waiting = len(slots) - visible - effect.dropped_count
        self._state.counters_of(tenant).committed += visible + waiting
        return Committed(visible, waiting, effect.dropped_count)

    def abort(self, tenant: str, session_id: bytes, token: bytes) -> Turns[int]:
        """The writer vouches that it has stopped. Slots freed; 0 when the lease has ended, or is yet to come.

        A Reserve that chose this token and has not begun is refused when it does.
        """
        freed = 0
        while True:
            session = self._sessions.get(tenant, session_id)
            if token not in self._state.leases.writes:
                if freed == 0:
                    self._state.leases.forestall(tenant, token)
                return freed
            lease = self._state.leases.write(token, tenant, session.instance_id, session.pid)
            freed += self._endings.abort(lease, ABORTED_AT_ONCE)
            if token in self._state.leases.writes:
                yield

    # -- admission -----------------------------------------------------------------------------

    def _admit_parts(
        self,
        namespace: Namespace,
        shard: int,
        kv_group: int,
        parent: Hashes | None,
        hashes: Hashes,
        device: HbmDevice | None,
    ) -> Iterator[Admitted]:
        """What is admitted of a run, after each of its parts, up to the first declined block."""
        # Room in HBM is for all of it or for none.
        count = BLOCKS_AT_ONCE if device is None else len(hashes)
        admitted: Admitted | None = None
        for first in range(0, len(hashes), count):
            above = hashes[first - 1 : first] if first else parent
            try:
                part = self.admit(namespace, shard, kv_group, above, hashes[first:], device, count, admitted)
            except InvalidRequest:
                # A repeated hash looks like a block of another chain once it is stored.
                if first:
                    refuse_repeats(hashes)
                raise
            admitted = part if admitted is None else admitted.then(part)
            if part.declined_count:
                left = len(hashes) - len(admitted.known) - len(admitted.slots)
                yield replace(admitted, declined_count=left)
                return
            yield admitted

    def admit(
        self,
        namespace: Namespace,
        shard: int,
        kv_group: int,
        parent: Hashes | None,
        hashes: Hashes,
        device: HbmDevice | None = None,
        count: int = BLOCKS_AT_ONCE,
        before: Admitted | None = None,
    ) -> Admitted:
        """Finds what is kept of the first `count` blocks, reserves slots and rows for the rest of them.

        Args:
            device: where slots are wanted in HBM.
            before: what the part of the run before these blocks got.
        """
        catalog = self._state.catalog
        coming, hashes = hashes, hashes[:count]
        space = self._space(namespace, shard, kv_group)
        if space is None:
            return self._admitted(np.zeros(0, np.int32), len(hashes), DeclineReason.LIMIT_REACHED)
        parent_row = NO_ROW if parent is None else int(catalog.find(space, parent)[0])
        rows = catalog.find(space, hashes)
        known = rows[: leading(rows != NO_ROW)]
        missing = len(hashes) - len(known)
        if parent is not None and parent_row == NO_ROW:
            if len(known):
                raise chain_mismatch()
            return self._admitted(known, len(hashes), DeclineReason.PARENT_MISSING)
        self._check_chain(rows, known, parent_row)
        goes_on = before is not None and len(before.slots) > 0
        if goes_on and len(known):
            # Since the last turn another has begun to store what comes next.
            return self._admitted(known[:0], len(hashes), DeclineReason.LIMIT_REACHED)
        if missing == 0:
            return self._admitted(known, 0, None)
        refuse_repeats(hashes[len(known) :])
        above = int(known[-1]) if len(known) else parent_row
        reason = self._limit_reached(namespace.tenant, above, len(coming) - len(known), goes_on)
        if reason is not None:
            return self._admitted(known, missing, reason)
        pool = catalog.namespaces.pool(namespace.tenant, namespace.spec.kv_groups[kv_group].slot_bytes)
        newcomers = before.newcomers if before is not None else None
        if newcomers is None:
            newcomers = self._workload.newcomers(namespace, coming[len(known) :], above)
        slots, reason, tier = self._slots(device, above, pool, missing, newcomers)
        self._reserve(space, above, hashes[len(known) :], tier, slots, newcomers)
        rest = replace(newcomers, returned_count=max(0, newcomers.returned_count - len(slots)))
        return self._admitted(known, missing - len(slots), reason, slots, tier, rest)

    def _slots(
        self, device: HbmDevice | None, above: int, pool: int, count: int, newcomers: Newcomers
    ) -> tuple[Slots, DeclineReason | None, Tier]:
        """Slots on the device for all of the blocks, when wanted and there are as many; else in DRAM."""
        if device is not None:
            slots = device.allocate_below(above, pool, count, whole=True)
            if len(slots) == count:
                return slots, None, Tier.HBM
            self._state.catalog.slots[Tier.HBM].free(slots)
        slots, reason = self._room.allocate_below(above, pool, count, newcomers)
        return slots, reason, Tier.DRAM

    def _reserve(
        self, space: int, above: int, fresh: Hashes, tier: Tier, slots: Slots, newcomers: Newcomers
    ) -> None:
        """Makes as many blocks known as there are slots, those of one history at a time."""
        first = 0
        for count, history, returned in newcomers.parts(len(slots)):
            part = slice(first, first + count)
            self._state.apply(
                BlocksReserved(
                    space, above, fresh[part], tier, slots[part], history, returned, newcomers.used_at
                )
            )
            above = int(self._state.catalog.slots[tier].row[slots[first + count - 1]])
            first += count

    def _admitted(
        self,
        known: Rows,
        declined: int,
        reason: DeclineReason | None,
        slots: Slots = NO_SLOTS,
        tier: Tier = Tier.DRAM,
        newcomers: Newcomers | None = None,
    ) -> Admitted:
        committed = (self._state.catalog.columns.flags[known] & COMMITTED) != 0
        return Admitted(known, committed, tier, slots, declined, reason if declined else None, newcomers)

    def _depth_below(self, namespace: Namespace, shard: int, kv_group: int, parent: Hashes | None) -> int:
        """Depth of the block below `parent`; 0 for a first block, or below one that is not kept."""
        if parent is None:
            return 0
        catalog = self._state.catalog
        row = int(catalog.find(catalog.namespaces.space(namespace, shard, kv_group), parent)[0])
        return 0 if row == NO_ROW else int(catalog.columns.depth[row]) + 1

    def _space(self, namespace: Namespace, shard: int, kv_group: int) -> int | None:
        """The space of blocks to store, made when it is new; None when the tenant may not have another."""
        catalog = self._state.catalog
        space = catalog.namespaces.space(namespace, shard, kv_group)
        if space is None:
            slot_bytes = namespace.spec.kv_groups[kv_group].slot_bytes
            if not self._state.quotas.may_store(catalog, namespace.tenant, slot_bytes):
                return None
            space = catalog.namespaces.make_space(namespace, shard, kv_group)
            catalog.tree.add_space(space, catalog.namespaces.pool(namespace.tenant, slot_bytes))
        return space

    def _check_chain(self, rows: Rows, known: Rows, parent_row: int) -> None:
        """A known block keeps its parent: a run that names another one is refused."""
        if (rows[len(known) :] != NO_ROW).any():
            raise chain_mismatch()
        if len(known):
            parents = self._state.catalog.columns.parent[known]
            if int(parents[0]) != parent_row or (parents[1:] != known[:-1]).any():
                raise chain_mismatch()

    def _limit_reached(self, tenant: str, above: int, count: int, goes_on: bool) -> DeclineReason | None:
        state = self._state
        quarantined = state.quarantined_bytes(tenant)
        tier_bytes = state.dram.segment_bytes * state.catalog.slots[Tier.DRAM].segment_count
        if quarantined > state.limits.quarantine_share_max * tier_bytes:
            return DeclineReason.QUARANTINE_FULL
        if not goes_on and state.leases.live_count(tenant) >= state.quotas.leases(tenant):
            return DeclineReason.LIMIT_REACHED
        hidden = not goes_on and above != NO_ROW and not state.catalog.columns.flags[above] & VISIBLE
        if hidden and state.catalog.waiting_count + count > state.limits.waiting_children_max:
            return DeclineReason.LIMIT_REACHED
        if state.catalog.columns.count + count > state.catalog.block_count_max:
            return DeclineReason.LIMIT_REACHED
        return None

    def _lease(
        self,
        session: Session,
        namespace: Namespace,
        shard: int,
        kv_group: int,
        admitted: Admitted,
        ttl_s: float,
        token: bytes,
    ) -> WriteLease:
        lease = WriteLease(
            token=token or secrets.token_bytes(TOKEN_BYTES),
            tenant=session.tenant,
            instance_id=session.instance_id,
            session_id=session.session_id,
            pid=session.pid,
            namespace=namespace,
            shard=shard,
            kv_group=kv_group,
            tier=admitted.tier,
            slots=admitted.slots,
            taken_at_wall=self._state.clock.wall(),
            expires_at=self._state.clock.now() + ttl_s,
        )
        self._state.leases.add(lease)
        return lease


def _check_order(lease: WriteLease, committed_before: int, count: int) -> None:
    if committed_before != lease.committed_count:
        raise StateConflict(
            "COMMIT_OUT_OF_ORDER",
            f"committed_before_count is {committed_before}, but {lease.committed_count} blocks of this "
            "lease are committed; an earlier Commit was repeated or lost: continue from there",
            field="committed_before_count",
            value=committed_before,
            expected=lease.committed_count,
        )
    if count > len(lease.slots) - lease.committed_count:
        raise InvalidRequest(
            "TOO_MANY_CHECKSUMS",
            f"{count} checksums, but {len(lease.slots) - lease.committed_count} reserved blocks are "
            "left to commit",
            field="checksums",
            value=count,
            limit=len(lease.slots) - lease.committed_count,
        )
