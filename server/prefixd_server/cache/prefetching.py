"""Bringing what queued requests will ask for, before they do.

A prefetch names a run, a place in the engine's queue and a deadline: a Prefetch call
makes one, and so does each queued request that ReportUsage tells of. What lies in
NVMe is copied to DRAM within a window, the next request's first (policy/prefetch.py), and
what is in DRAM is held there, so that nothing evicts it, until an engine acquires the
run, the request begins, the deadline passes, or somebody cancels.

Not here: copies (transfers.py), when background work may go on (scheduler.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixd_server.base.config import MigrationConfig
from prefixd_server.base.errors import LimitReached, PrefixdError
from prefixd_server.base.runs import leading
from prefixd_server.base.types import NO_SLOT, Hashes, PrefetchRun, Rows, Slots, SlotState, Tier
from prefixd_server.base.work import Errand, Reason, Urgency
from prefixd_server.cache.prefetch_holds import PrefetchHolds
from prefixd_server.cache.sessions import Session, Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.transfers import Transfers
from prefixd_server.catalog.leases import TOKEN_BYTES, ReadLease
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.policy.prefetch import Wanted, plan

WINDOW_BYTES = 64 << 20
"""Under way at a time: what is begun is finished also when a more urgent run comes."""
RETRY_S = 0.05
"""A run for which there was no room is looked at again after so long."""
HASH_COUNT_MAX = 1 << 18
"""Hashes that a tenant's prefetches may have together: 8 MiB."""

Part = tuple[int, int]
"""(shard, kv_group)"""


@dataclass(slots=True, eq=False)
class Prefetch:
    """One run on its way, or there and held.

    until: monotonic seconds; it is let go then.
    counts: by part, leading blocks that are held.
    """

    token: bytes
    session: Session
    namespace: Namespace
    hashes: Hashes
    position: int
    until: float
    reason: Reason
    number: int
    request_id: str
    held: dict[Part, list[Slots]] = field(default_factory=dict)
    counts: dict[Part, int] = field(default_factory=dict)
    under_way: int = 0
    ended: bool = False
    complete: bool = False
    """Nothing more can be brought."""
    retry_at: float = 0.0

    @property
    def name(self) -> tuple[str, str, str]:
        """Its request's."""
        return self.session.tenant, self.session.instance_id, self.request_id


class Prefetching:
    """See the module. Owned by the event loop.

    Args:
        transfers: None without a slower tier; then what is in DRAM is held, and nothing is brought.
    """

    def __init__(
        self, state: State, sessions: Sessions, transfers: Transfers | None, config: MigrationConfig
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._transfers = transfers
        self._config = config
        self.holds = PrefetchHolds(state, config.prefetch_share_max)
        self._all: dict[int, Prefetch] = {}
        self._by_token: dict[bytes, Prefetch] = {}
        self._by_name: dict[tuple[str, str, str], Prefetch] = {}
        self._by_run: dict[tuple[int, int], dict[bytes, list[Prefetch]]] = {}
        """By (namespace number, length of the run), then by its last hash."""
        self._next_number = 0
        self._may_bring = False
        self._coming: dict[int, int] = {}
        """Blocks under way, by pool: they will be held."""

    # -- asking --------------------------------------------------------------------------------

    def ask(self, tenant: str, session_id: bytes, runs: Sequence[PrefetchRun]) -> list[bytes]:
        """A Prefetch call: all of its runs, or none; their tokens.

        Raises:
            LimitReached: PREFETCH_LIMIT.
            NotFound, StateConflict: as Sessions.get and Namespaces.get.
        """
        self._state.refuse_when_draining()
        session = self._sessions.get(tenant, session_id)
        spaces = self._state.catalog.namespaces
        wanted = [(spaces.get(tenant, run.namespace), run) for run in runs]
        if not self._has_room(tenant, len(runs), sum(len(run.hashes) for run in runs)):
            raise LimitReached(
                "PREFETCH_LIMIT",
                f"a tenant has at most {self._config.prefetch_count_max:,} prefetches of {HASH_COUNT_MAX:,} "
                "hashes together; cancel some, or raise migration.prefetch_count_max",
                limit=self._config.prefetch_count_max,
            )
        return [
            self._add(session, namespace, run.hashes, run.queue_position, run.deadline_s, "").token
            for namespace, run in wanted
        ]

    def queued(
        self, session: Session, namespace: Namespace, request_id: str, hashes: Hashes | None, position: int
    ) -> None:
        """A request waits in an engine's queue; told again when its place changes."""
        known = self._by_name.get((session.tenant, session.instance_id, request_id))
        if known is not None:
            known.position = position
        elif hashes is not None and self._has_room(session.tenant, 1, len(hashes)):
            self._add(session, namespace, hashes, position, None, request_id)

    def cancel(self, tenant: str, session_id: bytes, tokens: Iterable[bytes]) -> int:
        """Lets prefetches go; how many were there. Copies under way arrive all the same."""
        self._sessions.get(tenant, session_id)
        found = [self._by_token.get(token) for token in tokens]
        mine = [prefetch for prefetch in found if prefetch and prefetch.session.tenant == tenant]
        for prefetch in mine:
            self._end(prefetch)
        return len(mine)

    def began(self, session: Session, request_id: str) -> None:
        """A request that was queued has begun, or has ended."""
        prefetch = self._by_name.get((session.tenant, session.instance_id, request_id))
        if prefetch is not None:
            self._end(prefetch)

    def acquired(
        self,
        session: Session,
        namespace: Namespace,
        hashes: Hashes,
        request_id: str,
        lease: ReadLease | None,
    ) -> None:
        """An engine has asked for a run: what was brought for it is used, and the hold is the lease's now."""
        if not self._all:
            return
        for hold in lease.shards.values() if lease else ():
            for piece in hold.pieces:
                if piece.tier is Tier.DRAM:
                    self.holds.leased(piece.slots)
        if request_id:
            self.began(session, request_id)
        for number, length in list(self._by_run):
            if number == namespace.number and length <= len(hashes):
                same = self._by_run[number, length].get(hashes[length - 1].tobytes(), ())
                for prefetch in list(same):
                    if not prefetch.request_id and prefetch.session.instance_id == session.instance_id:
                        self._end(prefetch)

    @property
    def count(self) -> int:
        """Prefetches that wait, are under way, or hold what they have brought."""
        return len(self._all)

    # -- the tick ------------------------------------------------------------------------------

    def expire(self) -> None:
        """Lets go what is over: by its deadline, with its session, with its namespace."""
        now = self._state.clock.now()
        for prefetch in list(self._all.values()):
            if prefetch.until <= now or prefetch.session.ended or self._is_dropped(prefetch.namespace):
                self._end(prefetch)

    def bring(self, may_bring: bool, bytes_per_s: float | None) -> None:
        """Holds and brings what is next.

        Args:
            may_bring: whether background work may begin; what is in DRAM is held in any case.
            bytes_per_s: of the link from NVMe, where it is known.
        """
        now = self._state.clock.now()
        self._may_bring = may_bring
        wanted = [
            Wanted(
                prefetch.number,
                prefetch.position,
                prefetch.until,
                _bytes_per_block(prefetch.namespace),
                len(prefetch.hashes) - min(prefetch.counts.values(), default=0),
            )
            for prefetch in self._all.values()
            if not prefetch.complete and not prefetch.under_way and prefetch.retry_at <= now
        ]
        for number, count in plan(wanted, WINDOW_BYTES - self._coming_bytes(), bytes_per_s, now):
            self._advance(self._all[number], count)

    def _advance(self, prefetch: Prefetch, count: int) -> None:
        """Holds the next blocks that are in DRAM; brings the next that are not, at most `count` of them."""
        moved = False
        stuck = True
        for part in prefetch.namespace.spec.parts:
            done = prefetch.counts.setdefault(part, 0)
            rows = self._rows(prefetch, part, done, done + count)
            held = self._hold(prefetch, part, rows)
            moved |= held > 0
            cold = rows[held:]
            stuck &= len(cold) == 0 or self._state.catalog.columns.slot[Tier.NVME][cold[0]] == NO_SLOT
            if len(cold) and self._may_bring and self._transfers is not None:
                moved |= self._bring(prefetch, part, cold[: self._room(self._pool(prefetch, part))])
        complete = min(prefetch.counts.values()) == len(prefetch.hashes)
        prefetch.complete = complete or (not moved and stuck)
        if not moved:
            prefetch.retry_at = self._state.clock.now() + RETRY_S

    def _rows(self, prefetch: Prefetch, part: Part, first: int, last: int) -> Rows:
        """Known and visible leading blocks of a piece of the run."""
        catalog = self._state.catalog
        space = catalog.namespaces.space(prefetch.namespace, *part)
        find = catalog.find_run if first else catalog.find_prefix
        rows = find(space, prefetch.hashes[first:last])
        return rows[: leading(catalog.visible(rows))]

    def _hold(self, prefetch: Prefetch, part: Part, rows: Rows) -> int:
        """Holds the leading rows that are resident in DRAM, as far as may be held; how many."""
        catalog = self._state.catalog
        pool = self._pool(prefetch, part)
        count = min(leading(catalog.resident(Tier.DRAM, rows)), self.holds.room(pool))
        if count:
            slots = catalog.columns.slot[Tier.DRAM][rows[:count]]
            self.holds.hold(pool, slots)
            prefetch.held.setdefault(part, []).append(slots)
            prefetch.counts[part] += count
        return count

    def _bring(self, prefetch: Prefetch, part: Part, rows: Rows) -> bool:
        """Starts to copy these blocks up; whether any are on their way."""
        assert self._transfers is not None, "asked only where there is a slower tier"
        slots = self._state.catalog.columns.slot[Tier.DRAM]
        fresh = rows[slots[rows] == NO_SLOT]
        errand = Errand(Urgency.PREFETCH, prefetch.reason)
        waits = self._transfers.promote(rows, errand)
        begun = slots[fresh]
        begun = begun[begun != NO_SLOT]
        if not waits:
            return False
        pool = self._pool(prefetch, part)
        self._coming[pool] = self._coming.get(pool, 0) + len(begun)
        prefetch.under_way += 1
        left = len(waits)

        def arrived(_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._coming[pool] -= len(begun)
                prefetch.under_way -= 1
                self._arrived(prefetch, part, len(rows), begun, errand.urgency is Urgency.DEMAND)

        for wait in waits:
            wait.add_done_callback(arrived)
        return True

    def _room(self, pool: int) -> int:
        """Blocks that may be brought beside those that are held and those that come."""
        return max(0, self.holds.room(pool) - self._coming.get(pool, 0))

    def _coming_bytes(self) -> int:
        pools = self._state.catalog.namespaces
        return sum(count * pools.pool_of(pool).slot_bytes for pool, count in self._coming.items())

    def _arrived(self, prefetch: Prefetch, part: Part, count: int, begun: Slots, awaited: bool) -> None:
        """Holds what has come, right after it was published, before anybody who waits for it goes on.

        Args:
            awaited: an engine has asked for it while it was on its way.
        """
        if not prefetch.ended:
            done = prefetch.counts[part]
            self._hold(prefetch, part, self._rows(prefetch, part, done, done + count))
        table = self._state.catalog.slots[Tier.DRAM]
        self.holds.brought(begun[table.state[begun] == SlotState.RESIDENT], awaited)

    # -- the end -------------------------------------------------------------------------------

    def _add(
        self,
        session: Session,
        namespace: Namespace,
        hashes: Hashes,
        position: int,
        deadline_s: float | None,
        request_id: str,
    ) -> Prefetch:
        longest = self._config.prefetch_hold_max_s
        self._next_number += 1
        prefetch = Prefetch(
            token=secrets.token_bytes(TOKEN_BYTES),
            session=session,
            namespace=namespace,
            hashes=np.array(hashes),
            position=position,
            until=self._state.clock.now() + min(longest if deadline_s is None else deadline_s, longest),
            reason=Reason.QUEUED_REQUEST if request_id else Reason.ASKED_AHEAD,
            number=self._next_number,
            request_id=request_id,
        )
        self._all[prefetch.number] = self._by_token[prefetch.token] = prefetch
        if request_id:
            self._by_name[prefetch.name] = prefetch
        runs = self._by_run.setdefault((namespace.number, len(hashes)), {})
        runs.setdefault(hashes[-1].tobytes(), []).append(prefetch)
        return prefetch

    def _end(self, prefetch: Prefetch) -> None:
        if prefetch.ended:
            return
        prefetch.ended = True
        for part, pieces in prefetch.held.items():
            pool = self._pool(prefetch, part)
            for slots in pieces:
                self.holds.let_go(pool, slots)
        del self._all[prefetch.number], self._by_token[prefetch.token]
        if prefetch.request_id:
            del self._by_name[prefetch.name]
        name, last = (prefetch.namespace.number, len(prefetch.hashes)), prefetch.hashes[-1].tobytes()
        self._by_run[name][last].remove(prefetch)
        if not self._by_run[name][last]:
            del self._by_run[name][last]
        if not self._by_run[name]:
            del self._by_run[name]

    def _has_room(self, tenant: str, count: int, hash_count: int) -> bool:
        """Whether the tenant may have so many more, with so many hashes together."""
        mine = [len(p.hashes) for p in self._all.values() if p.session.tenant == tenant]
        within = len(mine) + count <= self._config.prefetch_count_max
        return within and sum(mine) + hash_count <= HASH_COUNT_MAX

    def _pool(self, prefetch: Prefetch, part: Part) -> int:
        slot_bytes = prefetch.namespace.spec.kv_groups[part[1]].slot_bytes
        return self._state.catalog.namespaces.pool(prefetch.namespace.tenant, slot_bytes)

    def _is_dropped(self, namespace: Namespace) -> bool:
        try:
            self._state.catalog.namespaces.get(namespace.tenant, namespace.ref)
        except PrefixdError:
            return True
        return False


def _bytes_per_block(namespace: Namespace) -> int:
    """Of one block, over all its shards and KV groups."""
    spec = namespace.spec
    return spec.shard_count * sum(group.slot_bytes for group in spec.kv_groups)
