"""CacheService: one short method per RPC. Check, call, translate.

Bound to one socket's tenant. Errors, limits and metrics are handlers.py's
business; streams of a session are session_stream.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from prefixd.v1 import cache_service_pb2 as wire

from prefixd_server.base.config import LeaseConfig
from prefixd_server.base.errors import InvalidRequest
from prefixd_server.base.types import Hashes, NamespaceRef, NamespaceSpec, Tier
from prefixd_server.cache.cache import Cache
from prefixd_server.cache.turns import in_turns
from prefixd_server.rpc import answers, checks, requests
from prefixd_server.rpc.namespace_spec import spec_from_wire
from prefixd_server.rpc.put_assembly import PutAssembly, PutBuffers
from prefixd_server.rpc.seat import Seat
from prefixd_server.rpc.session_stream import SessionStream

MAX_WAIT_S = 10.0
"""Longest wait of an Acquire: an engine's patience for one request, not a parking place."""
REPORTS_IN_A_STEP = 4
"""Usage reports between which nobody else is served."""
HASHES_IN_A_STEP = 4096
"""A longer run is read in one step and leased in the next."""
RELEASES_IN_A_STEP = 32
"""Leases that end without anybody else being served."""
GET_PIECE_BYTES_MAX = 1 << 20
"""Bytes of one message of Get; small enough that a reader of any language keeps up."""


class CacheService:
    """What engines call, for one tenant."""

    def __init__(self, cache: Cache, seat: Seat, limits: LeaseConfig) -> None:
        self._cache = cache
        self._limits = limits
        self._seat = seat
        self._tenant = seat.tenant
        self._put_buffers = PutBuffers()

    def open_namespace(self, request: wire.OpenNamespaceRequest) -> wire.OpenNamespaceResponse:
        """Opens a namespace."""
        checks.present(request, "spec")
        ref = self._cache.open_namespace(self._tenant, spec_from_wire(request.spec))
        return wire.OpenNamespaceResponse(namespace=answers.namespace_ref(ref), boot_id=self._cache.boot_id)

    def open_session(
        self, messages: AsyncIterator[wire.OpenSessionRequest]
    ) -> AsyncIterator[wire.OpenSessionResponse]:
        """Opens a session and keeps it."""
        return SessionStream(self._cache, self._seat, self._limits).serve(messages)

    def lookup(self, request: wire.LookupRequest) -> wire.LookupResponse:
        """Tells what would hit."""
        ref, spec = self._namespace(request)
        run = checks.run(request, spec.hash_bytes)
        found = self._cache.lookup(self._tenant, ref, run)
        unread = found.pending_count or any(tier is Tier.NVME for tier, _ in found.hits)
        return answers.lookup(found, self._cache.readiness(self._tenant, ref, run) if unread else ())

    async def acquire(self, request: wire.AcquireRequest) -> wire.AcquireResponse:
        """Leases the longest resident prefix, after waiting for what is on its way if asked to."""
        ref, spec = self._namespace(request)
        run = checks.run(request, spec.hash_bytes)
        if len(run) > HASHES_IN_A_STEP:
            await asyncio.sleep(0)
        max_wait_s = checks.span_s(request, "max_wait", allow_zero=True)
        session_id = requests.session_id(request.session_id)
        if max_wait_s:
            await self._cache.wait_for(self._tenant, ref, run, min(max_wait_s, MAX_WAIT_S), session_id)
        acquired = self._cache.acquire(
            self._tenant,
            session_id,
            ref,
            run,
            requests.skip_count(request.skip_block_count, len(run)),
            requests.redeem_shards(request.redeem_shards, spec),
            checks.span_s(request, "ttl"),
            checks.utf8("request_id", request.request_id, requests.NAME_BYTES_MAX),
            requests.chosen_token(request.token),
        )
        after_s = self._cache.ready_after_s(self._tenant, ref, run) if acquired.run.pending_count else None
        return answers.acquired(acquired, self._cache.boot_id, after_s)

    def redeem(self, request: wire.RedeemRequest) -> wire.RedeemResponse:
        """Tells a worker the extents of its shard."""
        session_id, token = requests.session_id(request.session_id), requests.token(request.token)
        redeemed = self._cache.redeem(self._tenant, session_id, token, request.shard)
        return answers.redeemed(redeemed, self._cache.boot_id)

    async def release(self, request: wire.ReleaseRequest) -> wire.ReleaseResponse:
        """Ends leases; verifies blocks that were reported bad."""
        session_id = requests.session_id(request.session_id)
        releases = await in_turns(requests.releases)(request.releases)
        released = bad = 0
        for first in range(0, len(releases), RELEASES_IN_A_STEP):
            if first:
                await asyncio.sleep(0)
            some = releases[first : first + RELEASES_IN_A_STEP]
            more = await self._cache.release(self._tenant, session_id, some)
            released, bad = released + more[0], bad + more[1]
        return wire.ReleaseResponse(released_count=released, confirmed_bad_count=bad)

    async def reserve(self, request: wire.ReserveRequest) -> wire.ReserveResponse:
        """Reserves slots."""
        ref, spec = self._namespace(request)
        reserved = await self._cache.reserve_in_turns(
            self._tenant,
            requests.session_id(request.session_id),
            ref,
            requests.shard(request.shard, spec),
            requests.kv_group(request.kv_group, spec),
            _parent(request.parent_hash, spec),
            checks.run(request, spec.hash_bytes),
            checks.span_s(request, "ttl"),
            checks.span_s(request, "recompute_cost", allow_zero=True),
            requests.wanted_tier(request.wanted_tier),
            requests.chosen_token(request.token),
        )
        return answers.reserved(reserved, self._cache.boot_id)

    def commit(self, request: wire.CommitRequest) -> wire.CommitResponse:
        """Publishes reserved blocks."""
        session_id, token = requests.session_id(request.session_id), requests.token(request.token)
        checksums = requests.checksums(request.checksums)
        done = self._cache.commit(self._tenant, session_id, token, request.committed_before_count, checksums)
        return wire.CommitResponse(
            visible_count=done.visible_count,
            waiting_count=done.waiting_count,
            dropped_count=done.dropped_count,
        )

    async def abort(self, request: wire.AbortRequest) -> wire.AbortResponse:
        """Gives up reserved blocks."""
        session_id, token = requests.session_id(request.session_id), requests.token(request.token)
        freed = await self._cache.abort_in_turns(self._tenant, session_id, token)
        return wire.AbortResponse(freed_slot_count=freed)

    async def put(self, messages: AsyncIterator[wire.PutRequest]) -> wire.PutResponse:
        """Takes blocks one by one; those before a fault stay stored."""
        header = _header(await anext(messages, None))
        ref, spec = self._namespace(header)
        shard, group = requests.shard(header.shard, spec), requests.kv_group(header.kv_group, spec)
        target = self._cache.begin_put(self._tenant, ref, shard, group, _parent(header.parent_hash, spec))
        block_bytes = spec.kv_groups[group].block_bytes
        assembly = PutAssembly(block_bytes, spec.hash_bytes)
        with self._put_buffers.hold(block_bytes):
            async for message in messages:
                block = assembly.take(message)
                if block is not None:
                    await target.add(block.key, block.checksum, block.data)
            assembly.finish()
        stored, present, declined, reason = target.finish()
        return wire.PutResponse(
            stored_count=stored,
            present_count=present,
            declined_count=declined,
            decline_reason=answers.decline_reason(reason),
        )

    async def get(self, request: wire.GetRequest) -> AsyncIterator[wire.GetResponse]:
        """Hands out the hit blocks, in pieces."""
        ref, spec = self._namespace(request)
        shard, group = requests.shard(request.shard, spec), requests.kv_group(request.kv_group, spec)
        run = checks.run(request, spec.hash_bytes)
        await self._cache.wait_for(self._tenant, ref, run, MAX_WAIT_S)
        source = self._cache.begin_get(self._tenant, ref, shard, group, run)
        try:
            summary = wire.GetSummary(hit_block_count=source.hit_count, block_bytes=source.block_bytes)
            source.await_reader()
            yield wire.GetResponse(summary=summary)
            async for index, checksum, data in source:
                for message in _pieces(index, checksum, data):
                    source.await_reader()
                    yield message
        finally:
            source.close()

    async def prefetch(self, request: wire.PrefetchRequest) -> wire.PrefetchResponse:
        """Has runs brought before they are asked for."""
        session_id = requests.session_id(request.session_id)
        requests.prefetch_target(request.target_tier)
        runs = requests.prefetch_runs(request.runs, self._spec_of)
        tokens = self._cache.prefetch(self._tenant, session_id, runs)
        statuses = []
        for token, run in zip(tokens, runs, strict=True):
            statuses.append(self._cache.prefetch_status(self._tenant, run.namespace, run.hashes, token))
            await asyncio.sleep(0)
        return wire.PrefetchResponse(runs=[answers.prefetch_status(status) for status in statuses])

    def cancel_prefetch(self, request: wire.CancelPrefetchRequest) -> wire.CancelPrefetchResponse:
        """Lets prefetches go."""
        session_id, tokens = requests.session_id(request.session_id), requests.tokens(request.prefetch_ids)
        count = self._cache.cancel_prefetches(self._tenant, session_id, tokens)
        return wire.CancelPrefetchResponse(cancelled_count=count)

    async def report_usage(self, request: wire.ReportUsageRequest) -> wire.ReportUsageResponse:
        """Takes reports about requests."""
        session_id = requests.session_id(request.session_id)
        quiet_s = checks.span_s(request, "quiet_period", allow_zero=True)
        allow_none = quiet_s is not None
        reports = await in_turns(requests.reports)(request.reports, self._spec_of, allow_none=allow_none)
        accepted = self._cache.report_usage(self._tenant, session_id, reports[:REPORTS_IN_A_STEP], quiet_s)
        for first in range(REPORTS_IN_A_STEP, len(reports), REPORTS_IN_A_STEP):
            await asyncio.sleep(0)
            some = reports[first : first + REPORTS_IN_A_STEP]
            accepted += self._cache.report_usage(self._tenant, session_id, some, None)
        return wire.ReportUsageResponse(accepted_count=accepted)

    def _spec_of(self, ref: NamespaceRef) -> NamespaceSpec:
        return self._cache.spec_of(self._tenant, ref)

    def _namespace(self, request: requests.NamesNamespace) -> tuple[NamespaceRef, NamespaceSpec]:
        ref = requests.namespace_ref(request.namespace)
        return ref, self._spec_of(ref)


def _parent(value: bytes, spec: NamespaceSpec) -> Hashes | None:
    return checks.one_hash("parent_hash", value, spec.hash_bytes) if value else None


def _header(message: wire.PutRequest | None) -> wire.PutHeader:
    if message is None or message.WhichOneof("message") != "header":
        raise InvalidRequest(
            "HEADER_MISSING", "the first message of Put must be header; send it first", field="header"
        )
    return message.header


def _pieces(index: int, checksum: int, data: memoryview) -> list[wire.GetResponse]:
    """One block as messages; the bytes are copied here, since the slot may change once its lease is gone."""
    first = wire.GetBlock(block_index=index, checksum=checksum, data=bytes(data[:GET_PIECE_BYTES_MAX]))
    rest = range(GET_PIECE_BYTES_MAX, len(data), GET_PIECE_BYTES_MAX)
    return [
        wire.GetResponse(block=first),
        *(wire.GetResponse(data=bytes(data[at : at + GET_PIECE_BYTES_MAX])) for at in rest),
    ]
