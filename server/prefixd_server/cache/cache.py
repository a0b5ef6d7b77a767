"""The node's cache, as the rpc floor calls it: one facade over the rooms of this floor.

Every method runs on the event loop and takes the tenant that its socket stands
for. The rooms do the work: reading, releasing, writing, portable, usage, administration,
room, rebalancing, endings; sessions is theirs and the sockets'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from prefixd_server.base.accounts import Stats
from prefixd_server.base.errors import InvalidRequest, Unavailable
from prefixd_server.base.types import NamespaceRef, NamespaceSpec
from prefixd_server.cache.administration import Administration
from prefixd_server.cache.checking import Checking
from prefixd_server.cache.companions import Companions
from prefixd_server.cache.conservative import Setting
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.epochs import Epochs
from prefixd_server.cache.evicting import PAUSE_S, Evicting
from prefixd_server.cache.explaining import Explaining
from prefixd_server.cache.hbm_placement import HbmPlacement
from prefixd_server.cache.migration import Migration
from prefixd_server.cache.portable import Portable
from prefixd_server.cache.prefetching import Prefetching
from prefixd_server.cache.readiness import Readiness
from prefixd_server.cache.reading import Reading
from prefixd_server.cache.rebalancing import Rebalancing
from prefixd_server.cache.releasing import Releasing
from prefixd_server.cache.room import Room
from prefixd_server.cache.sessions import DrainingNotice, FarewellNotice, Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.storage import Storage
from prefixd_server.cache.turns import at_once, in_turns
from prefixd_server.cache.usage import Usage
from prefixd_server.cache.watching import Watchers
from prefixd_server.cache.writing import Writing

SWEEP_INTERVAL_S = 0.05
"""How late an expiry may be noticed."""
EXPIRY_COUNT_MAX = 32
"""Leases that end in one step because their time is over, and as many Gets."""


class Cache:
    """See the module. Built by build_cache()."""

    def __init__(
        self,
        state: State,
        epochs: Epochs,
        sessions: Sessions,
        endings: Endings,
        room: Room,
        rebalancing: Rebalancing,
        reading: Reading,
        releasing: Releasing,
        writing: Writing,
        portable: Portable,
        usage: Usage,
        administration: Administration,
        storage: Storage | None,
        hbm: HbmPlacement | None,
        migration: Migration,
        prefetching: Prefetching,
        readiness: Readiness,
        companions: Companions,
        watchers: Watchers,
    ) -> None:
        self.state = state
        self._epochs = epochs
        self._endings = endings
        self._portable = portable
        self.room = room
        self.rebalancing = rebalancing
        self._tasks: list[asyncio.Task[None]] = []
        self._storage_task: asyncio.Task[None] | None = None
        self.sessions = sessions
        self.companions = companions
        self.boot_id = state.boot_id
        self.limits = state.limits
        self.storage = storage
        self.hbm = hbm
        self.migration = migration
        self.prefetching = prefetching
        self.prefetch = prefetching.ask
        self.cancel_prefetches = prefetching.cancel
        self.readiness = readiness.of
        self.ready_after_s = readiness.ready_after_s
        self.prefetch_status = readiness.status
        self.lookup = reading.lookup
        self.wait_for = reading.wait_for
        self.acquire = reading.acquire
        self.redeem = reading.redeem
        self.release = releasing.release
        self.reserve = at_once(writing.reserve)
        self.reserve_in_turns = in_turns(writing.reserve)
        self.commit = writing.commit
        self.abort = at_once(writing.abort)
        self.abort_in_turns = in_turns(writing.abort)
        self.begin_put = portable.begin_put
        self.begin_get = portable.begin_get
        self.report_usage = usage.report
        self.describe = administration.describe
        self.explain = Explaining(state).explain
        self.watchers = watchers
        evicting = Evicting(state)
        self.evict = at_once(evicting.evict)
        self.evict_in_turns = in_turns(evicting.evict, PAUSE_S)
        self.pin = administration.pin
        self.list_leases = administration.list_leases
        self.list_namespaces = administration.list_namespaces
        self.drop_namespace = administration.drop_namespace
        self._administration = administration
        checking = Checking(state, prefetching.holds)
        self.check = checking.everything
        self.check_at_leisure = checking.at_leisure

    # -- namespaces ----------------------------------------------------------------------------

    def open_namespace(self, tenant: str, spec: NamespaceSpec) -> NamespaceRef:
        """The namespace of this spec, made when it is new."""
        self.state.refuse_when_draining()
        largest = self.state.dram.segment_bytes
        for index, group in enumerate(spec.kv_groups):
            if group.slot_bytes > largest:
                raise _block_too_large(index, group.block_bytes, largest)
        quotas, fingerprint = self.state.quotas, spec.fingerprint()
        quotas.check_names(self.state.catalog, tenant, fingerprint)
        fresh = self._epochs.fresh(tenant, fingerprint)
        namespace = self.state.catalog.namespaces.open(
            tenant, spec, fresh, self.state.clock.wall(), quotas.namespaces(tenant)
        )
        return namespace.ref

    def spec_of(self, tenant: str, ref: NamespaceRef) -> NamespaceSpec:
        """What the namespace was opened with. Raises NotFound, StateConflict as Namespaces.get does."""
        return self.state.catalog.namespaces.get(tenant, ref).spec

    def set_policy(self, name: str) -> None:
        """Has another policy choose from now on. Raises InvalidRequest POLICY_UNKNOWN."""
        policy = self.state.policies.get(name)
        if policy is None:
            raise InvalidRequest(
                "POLICY_UNKNOWN",
                f"policy = {name}: must be one of {', '.join(self.state.policies)}",
                field="policy",
                value=name,
            )
        self.state.policy = policy

    def set_conservative(self, word: str) -> None:
        """Conservative mode "auto", "on" or "off" from now on. Raises InvalidRequest CONSERVATIVE_UNKNOWN."""
        known = [setting.value for setting in Setting]
        if word not in known:
            raise InvalidRequest(
                "CONSERVATIVE_UNKNOWN",
                f"conservative = {word}: must be one of {', '.join(known)}",
                field="conservative",
                value=word,
            )
        self.migration.set_conservative(Setting(word))

    def stats(self, tenant: str | None) -> Stats:
        """Of one tenant, or of all (None). Tiers are the whole node's, and so is traffic.

        Of traffic a tenant is told the mode alone: what moves is also others' doing.
        """
        traffic = self.migration.traffic()
        if tenant is None:
            holds = self.prefetching.holds
            traffic = replace(traffic, prefetch=holds.counters, prefetch_count=self.prefetching.count)
        else:
            traffic = traffic.mode_alone()
        return replace(self._administration.stats(tenant), traffic=traffic)

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the background tasks on the running loop."""
        loop = asyncio.get_running_loop()
        if self.storage is not None:
            self._storage_task = loop.create_task(self.storage.run())
            self._tasks.append(self._storage_task)
        if self.hbm is not None:
            self._tasks += [loop.create_task(self.hbm.tier.run()), loop.create_task(self.hbm.run())]
        self._tasks += [loop.create_task(self._sweep()), loop.create_task(self.rebalancing.run())]
        self._tasks.append(loop.create_task(self._administration.run()))

    async def stop(self) -> None:
        """Ends the background tasks, waits for the movers, gives the memory back."""
        for task in self._tasks:
            task.cancel()
        # What ended one before its time, raise_if_broken() tells.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.migration.hurry()
        arrived = self.storage is None or await self.storage.close()
        if self.hbm is not None:
            await self.hbm.close()
        await self.state.movers.drain()
        self.state.movers.close()
        if arrived:
            self.state.dram.close()

    def raise_if_broken(self) -> None:
        """Raises what ended a background task, if one has ended: none ever should."""
        for task in self._tasks:
            if task.done():
                task.result()

    def step(self) -> bool:
        """One bounded round of housekeeping: expiries, then dropped namespaces. Whether more is due."""
        now = self.state.clock.now()
        expired_counts = [due.expire(now, EXPIRY_COUNT_MAX) for due in (self._endings, self._portable)]
        self.prefetching.expire()
        if self.storage is None:
            self.prefetching.bring(False, None)
        if self.room.has_garbage:
            self.room.reclaim()
        return self.room.has_garbage or EXPIRY_COUNT_MAX in expired_counts

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(0 if self.step() else SWEEP_INTERVAL_S)

    # -- drain ---------------------------------------------------------------------------------

    def drain_begin(self, gone_after_s: float | None = None) -> None:
        """From now on nothing new is admitted; every session is told."""
        self.state.draining = True
        notice = DrainingNotice(self.state.drain_timeout_s if gone_after_s is None else gone_after_s)
        for session in self.sessions.open_of():
            session.notify(notice)

    async def drained(self, timeout_s: float) -> int:
        """Waits until no lease is held, at most `timeout_s`; how many are held then."""
        return await _until_zero(self.state.leases.live_count, timeout_s)

    async def hand_over(self) -> None:
        """Closes what is durable, for the next daemon to open; memory serves on. Not to be cancelled.

        Raises:
            Unavailable: HAND_OVER_FAILED, when the disk hangs: it must not be opened a second time.
        """
        self.state.handed_over = True
        # Epochs that are being written.
        await self.state.movers.drain()
        if self._storage_task is not None:
            self._tasks.remove(self._storage_task)
            self._storage_task.cancel()
            await asyncio.gather(self._storage_task, return_exceptions=True)
            self._storage_task = None
        if self.storage is not None and not await self.storage.hand_over():
            self.state.handed_over = False
            raise Unavailable(
                "HAND_OVER_FAILED",
                "the NVMe disk hangs, and what it still writes must not meet another daemon; stop this one",
            )
        self.storage = None

    def farewell(self) -> int:
        """Ends sessions whose instance holds nothing here; how many are open still."""
        leases = self.state.leases
        holders = {(lease.tenant, lease.instance_id) for lease in leases.reads.values()}
        holders |= {(w.tenant, w.instance_id) for w in leases.writes.values() if not w.quarantined}
        remaining = self.sessions.open_of()
        for session in remaining:
            if (session.tenant, session.instance_id) not in holders:
                session.notify(FarewellNotice())
        return len(remaining)


async def _until_zero(count: Callable[[], int], timeout_s: float, interval_s: float = 0.02) -> int:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while (left := count()) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(interval_s)
    return left


def _block_too_large(index: int, block_bytes: int, limit: int) -> InvalidRequest:
    """A block must fit into one segment."""
    return InvalidRequest(
        "BLOCK_TOO_LARGE",
        f"kv_groups[{index}].block_bytes is {block_bytes}, a block must fit into one segment of "
        f"{limit} bytes; use fewer tokens per block, or raise dram.segment",
        field=f"spec.kv_groups[{index}].block_bytes",
        value=block_bytes,
        limit=limit,
    )
