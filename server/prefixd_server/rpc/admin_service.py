"""AdminService: one short method per RPC. Check, call, translate.

A tenant's socket sees and changes that tenant alone; what concerns the whole
daemon needs an admin socket.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from prefixd.v1 import admin_service_pb2 as wire

import prefixd_server
from prefixd_server.base.errors import Forbidden
from prefixd_server.base.types import Hashes, NamespaceRef, NamespaceSpec
from prefixd_server.cache.cache import Cache
from prefixd_server.rpc import answers, checks, requests
from prefixd_server.rpc.seat import Seat

Drain = Callable[[float | None], Awaitable[int]]
"""Stops admitting, waits at most so many seconds (None: as configured); leases still held."""


HandOver = Callable[[AsyncIterator[wire.HandOverRequest]], AsyncIterator[wire.HandOverResponse]]
"""Answers the steps of a daemon that takes over."""


@dataclass(frozen=True, slots=True)
class Ends:
    """How the daemon ends on a caller's word."""

    drain: Drain
    hand_over: HandOver


class AdminService:
    """What operators call, for one tenant's socket."""

    def __init__(self, cache: Cache, seat: Seat, ends: Ends) -> None:
        self._cache = cache
        self._seat = seat
        self._tenant = seat.tenant
        self._ends = ends

    def get_stats(self, _: wire.GetStatsRequest) -> wire.GetStatsResponse:
        """Counters and gauges."""
        stats = self._cache.stats(None if self._seat.admin else self._tenant)
        return answers.stats(stats, self._cache.boot_id, prefixd_server.__version__)

    def list_namespaces(self, _: wire.ListNamespacesRequest) -> wire.ListNamespacesResponse:
        """The tenant's namespaces."""
        found = self._cache.list_namespaces(self._tenant)
        return wire.ListNamespacesResponse(namespaces=[answers.namespace_info(item) for item in found])

    async def drop_namespace(self, request: wire.DropNamespaceRequest) -> wire.DropNamespaceResponse:
        """Forgets a namespace."""
        ref = requests.namespace_ref(request.namespace)
        new_epoch, dropped = await self._cache.drop_namespace(self._tenant, ref)
        return wire.DropNamespaceResponse(new_epoch=new_epoch, dropped_block_count=dropped)

    def list_leases(self, _: wire.ListLeasesRequest) -> wire.ListLeasesResponse:
        """Who holds what since when."""
        found = self._cache.list_leases(self._tenant)
        return wire.ListLeasesResponse(leases=[answers.lease_info(item) for item in found])

    def describe_block(self, request: wire.DescribeBlockRequest) -> wire.DescribeBlockResponse:
        """Everything known about one block."""
        ref, spec = self._namespace(request)
        shard, group = requests.shard(request.shard, spec), requests.kv_group(request.kv_group, spec)
        key = checks.one_hash("block_hash", request.block_hash, spec.hash_bytes)
        found = self._cache.describe(self._tenant, ref, shard, group, key)
        return answers.block_info(found, spec.hash_bytes)

    async def evict(self, request: wire.EvictRequest) -> wire.EvictResponse:
        """Evicts blocks of a run, or all."""
        ref, spec = self._namespace(request)
        run = checks.run(request, spec.hash_bytes, allow_empty=True)
        evicting = self._cache.evict_in_turns(self._tenant, ref, _or_none(run), request.keep_block_count)
        evicted, held = await evicting
        return wire.EvictResponse(evicted_block_count=evicted, held_block_count=held)

    def pin(self, request: wire.PinRequest) -> wire.PinResponse:
        """Keeps a run from eviction."""
        ref, spec = self._namespace(request)
        run = checks.run(request, spec.hash_bytes)
        return wire.PinResponse(pinned_block_count=self._cache.pin(self._tenant, ref, run, True))

    def unpin(self, request: wire.UnpinRequest) -> wire.UnpinResponse:
        """Undoes pin."""
        ref, spec = self._namespace(request)
        run = checks.run(request, spec.hash_bytes)
        return wire.UnpinResponse(unpinned_block_count=self._cache.pin(self._tenant, ref, run, False))

    async def drain(self, request: wire.DrainRequest) -> wire.DrainResponse:
        """Stops admitting and waits for leases to end."""
        self._need_admin("Drain")
        timeout_s = checks.span_s(request, "timeout", allow_zero=True)
        return wire.DrainResponse(remaining_lease_count=await self._ends.drain(timeout_s))

    async def check(self, _: wire.CheckRequest) -> wire.CheckResponse:
        """Verifies the catalog."""
        self._need_admin("Check")
        began = time.perf_counter()
        problems = await self._cache.check_at_leisure()
        elapsed = answers.duration(time.perf_counter() - began)
        block_count = self._cache.stats(None).block_count
        return wire.CheckResponse(problems=problems, block_count=block_count, elapsed=elapsed)

    def explain_block(self, request: wire.ExplainBlockRequest) -> wire.ExplainBlockResponse:
        """What one block is worth, where it would be placed, and why."""
        ref, spec = self._namespace(request)
        shard, group = requests.shard(request.shard, spec), requests.kv_group(request.kv_group, spec)
        key = checks.one_hash("block_hash", request.block_hash, spec.hash_bytes)
        return answers.explanation(self._cache.explain(self._tenant, ref, shard, group, key))

    def set_mode(self, request: wire.SetModeRequest) -> wire.SetModeResponse:
        """Switches how the daemon decides."""
        self._need_admin("SetMode")
        policy = checks.utf8("policy", request.policy, requests.NAME_BYTES_MAX)
        conservative = checks.utf8("conservative", request.conservative, requests.NAME_BYTES_MAX)
        if policy:
            self._cache.set_policy(policy)
        if conservative:
            self._cache.set_conservative(conservative)
        return answers.mode(self._cache.state.policy.name, self._cache.stats(None).traffic)

    async def watch_events(self, _: wire.WatchEventsRequest) -> AsyncIterator[wire.WatchEventsResponse]:
        """The tenant's requests as they begin and end."""
        watch = self._cache.watchers.open(self._tenant)
        try:
            async for event in watch:
                yield answers.event(event)
        finally:
            self._cache.watchers.close(self._tenant, watch)

    def hand_over(self, steps: AsyncIterator[wire.HandOverRequest]) -> AsyncIterator[wire.HandOverResponse]:
        """Gives the node to the daemon that calls, step by step."""
        self._need_admin("HandOver")
        return self._ends.hand_over(steps)

    def _namespace(self, request: requests.NamesNamespace) -> tuple[NamespaceRef, NamespaceSpec]:
        ref = requests.namespace_ref(request.namespace)
        return ref, self._cache.spec_of(self._tenant, ref)

    def _need_admin(self, method: str) -> None:
        if not self._seat.admin:
            raise Forbidden(
                "ADMIN_REQUIRED",
                f"{method} concerns the whole daemon; call it on an admin socket (the first tenant's, or one "
                "configured with admin = true)",
                method=method,
            )


def _or_none(run: Hashes) -> Hashes | None:
    return run if len(run) else None
