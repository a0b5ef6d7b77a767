"""The floors' own values as messages of the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from prefixd.v1 import admin_service_pb2 as admin
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2

from prefixd_server.base.accounts import (
    BlockInfo,
    DeviceStats,
    Explanation,
    LeaseInfo,
    NamespaceInfo,
    Stats,
    TierStats,
)
from prefixd_server.base.traffic import Traffic
from prefixd_server.base.types import (
    Acquired,
    DeclineReason,
    DeviceSegment,
    Extent,
    LeaseGrant,
    NamespaceRef,
    PrefetchStatus,
    Redeemed,
    Reserved,
    RunHits,
    ShardExtents,
    TierReadiness,
)
from prefixd_server.cache.watching import ConservativeModeChanged, Event, EventsLost, RequestEnded
from prefixd_server.rpc.namespace_spec import spec_to_wire, wire_enum


def duration(seconds: float) -> Duration:
    """A span, never negative."""
    whole, nanos = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


def optional_duration(seconds: float | None) -> Duration | None:
    """A span; absent for None."""
    return None if seconds is None else duration(seconds)


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch."""
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Timestamp(seconds=whole, nanos=nanos)


def namespace_ref(ref: NamespaceRef) -> types_pb2.NamespaceRef:
    """A namespace at its epoch."""
    return types_pb2.NamespaceRef(fingerprint=ref.fingerprint, epoch=ref.epoch)


def lease(grant: LeaseGrant, boot_id: bytes) -> types_pb2.Lease:
    """A lease with its remaining life."""
    return types_pb2.Lease(token=grant.token, expires_after=duration(grant.expires_after_s), boot_id=boot_id)


def extent(value: Extent) -> types_pb2.Extent:
    """One extent."""
    return types_pb2.Extent(
        tier=wire_enum(value.tier),
        segment_id=value.segment_id,
        offset_bytes=value.offset_bytes,
        stride_bytes=value.stride_bytes,
        first_block=value.first_block,
        block_count=value.block_count,
        checksums=() if value.checksums is None else value.checksums.tolist(),
    )


def shard_extents(value: ShardExtents) -> types_pb2.ShardExtents:
    """The extents of one shard and KV group."""
    return types_pb2.ShardExtents(
        shard=value.shard, kv_group=value.kv_group, extents=[extent(item) for item in value.extents]
    )


def device_segments(values: Iterable[DeviceSegment]) -> list[types_pb2.DeviceSegment]:
    """How segments in GPU memory are opened."""
    return [
        types_pb2.DeviceSegment(
            segment_id=value.segment_id,
            ipc_handle=value.ipc_handle,
            device_uuid=value.device_uuid,
            length_bytes=value.length_bytes,
        )
        for value in values
    ]


def tier_hits(run: RunHits) -> list[types_pb2.TierHit]:
    """Hits in run order."""
    return [types_pb2.TierHit(tier=wire_enum(tier), block_count=count) for tier, count in run.hits]


def lookup(run: RunHits, readiness: Sequence[TierReadiness]) -> wire.LookupResponse:
    """Answer of Lookup."""
    return wire.LookupResponse(
        hits=tier_hits(run),
        pending_block_count=run.pending_count,
        miss_block_count=run.miss_count,
        readiness=[
            types_pb2.TierReadiness(
                tier=wire_enum(entry.tier),
                ready_block_count=entry.ready_count,
                pending_block_count=entry.pending_count,
                ready_after=optional_duration(entry.ready_after_s),
            )
            for entry in readiness
        ],
    )


def prefetch_status(value: PrefetchStatus) -> wire.PrefetchStatus:
    """One run of a Prefetch."""
    return wire.PrefetchStatus(
        prefetch_id=value.token,
        ready_block_count=value.ready_count,
        pending_block_count=value.pending_count,
        miss_block_count=value.miss_count,
        ready_after=optional_duration(value.ready_after_s),
    )


def acquired(value: Acquired, boot_id: bytes, ready_after_s: float | None) -> wire.AcquireResponse:
    """Answer of Acquire."""
    return wire.AcquireResponse(
        ready_after=optional_duration(ready_after_s),
        lease=None if value.lease is None else lease(value.lease, boot_id),
        hits=tier_hits(value.run),
        pending_block_count=value.run.pending_count,
        miss_block_count=value.run.miss_count,
        shard_extents=[shard_extents(item) for item in value.shard_extents],
        device_segments=device_segments(value.device_segments),
    )


def redeemed(value: Redeemed, boot_id: bytes) -> wire.RedeemResponse:
    """Answer of Redeem."""
    return wire.RedeemResponse(
        lease=lease(value.lease, boot_id),
        shard_extents=[shard_extents(item) for item in value.shard_extents],
        device_segments=device_segments(value.device_segments),
    )


def reserved(value: Reserved, boot_id: bytes) -> wire.ReserveResponse:
    """Answer of Reserve."""
    return wire.ReserveResponse(
        lease=None if value.lease is None else lease(value.lease, boot_id),
        outcomes=[
            types_pb2.OutcomeRange(outcome=wire_enum(outcome), block_count=count)
            for outcome, count in value.outcomes
        ],
        extents=[extent(item) for item in value.extents],
        decline_reason=decline_reason(value.decline_reason),
        retry_after=None if value.retry_after_s is None else duration(value.retry_after_s),
        device_segments=device_segments(value.device_segments),
    )


def decline_reason(value: DeclineReason | None) -> Any:
    """Why blocks were declined, if any were."""
    return 0 if value is None else wire_enum(value)


def stats(value: Stats, boot_id: bytes, version: str) -> admin.GetStatsResponse:
    """Answer of GetStats."""
    counters = value.counters
    tiers_on = [tier.tier for tier in value.tiers]
    return admin.GetStatsResponse(
        boot_id=boot_id,
        server_version=version,
        uptime=duration(value.uptime_s),
        tiers=[_tier_stats(tier) for tier in value.tiers],
        asked_block_count=counters.asked,
        hits=[admin.TierHitTotal(tier=wire_enum(tier), block_count=counters.hits[tier]) for tier in tiers_on],
        pending_block_count=counters.pending,
        miss_block_count=counters.missed,
        committed_block_count=counters.committed,
        declined_block_count=counters.declined,
        evicted_block_count=counters.evicted,
        bad_block_count=counters.bad,
        lease_count=value.lease_count,
        session_count=value.session_count,
        metadata_bytes=value.metadata_bytes,
        block_count=value.block_count,
        draining=value.draining,
        traffic=_traffic(value.traffic),
    )


def _traffic(value: Traffic) -> admin.Traffic:
    return admin.Traffic(
        links=[
            admin.LinkStats(
                name=link.name,
                demand_bytes=link.demand_bytes,
                prefetch_bytes=link.prefetch_bytes,
                demotion_bytes=link.demotion_bytes,
                background_share=link.background_share,
                demand_share=link.demand_share,
            )
            for link in value.links
        ],
        transfers=[
            admin.TransferTotal(reason=reason.value, block_count=count.block_count, size_bytes=count.bytes)
            for reason, count in value.transfers.items()
            if count.block_count
        ],
        prefetch_count=value.prefetch_count,
        prefetch_brought_bytes=value.prefetch.brought_bytes,
        prefetch_used_bytes=value.prefetch.used_bytes,
        prefetch_useless_bytes=value.prefetch.useless_bytes,
        conservative=value.conservative,
        conservative_setting=value.conservative_setting,
        conservative_reason=value.conservative_reason,
        conservative_entered_count=value.conservative_entered_count,
        quiet=optional_duration(value.quiet_s or None),
        decode_p99=optional_duration(value.decode_p99_s),
    )


def mode(policy: str, traffic: Traffic) -> admin.SetModeResponse:
    """Answer of SetMode."""
    return admin.SetModeResponse(
        policy=policy,
        conservative=traffic.conservative_setting,
        conservative_on=traffic.conservative,
        conservative_reason=traffic.conservative_reason,
    )


def _tier_stats(value: TierStats) -> admin.TierStats:
    return admin.TierStats(
        tier=wire_enum(value.tier),
        capacity_bytes=value.capacity_bytes,
        assigned_bytes=value.assigned_bytes,
        prefaulted_bytes=value.prefaulted_bytes,
        segment_count=value.segment_count,
        segment_bytes=value.segment_bytes,
        slot_count=value.slot_count,
        free_slot_count=value.free_slot_count,
        reserved_slot_count=value.reserved_slot_count,
        resident_slot_count=value.resident_slot_count,
        quarantined_slot_count=value.quarantined_slot_count,
        numa_nodes=value.numa_nodes,
        page_kind=value.page_kind,
        state=value.state,
        state_reason=value.state_reason,
        fault_counts={kind.value: count for kind, count in value.fault_counts.items()},
        devices=[_device_stats(device) for device in value.devices],
    )


def _device_stats(value: DeviceStats) -> admin.DeviceStats:
    return admin.DeviceStats(
        uuid=value.uuid,
        capacity_bytes=value.capacity_bytes,
        allocated_bytes=value.allocated_bytes,
        free_slot_count=value.free_slot_count,
        reserved_slot_count=value.reserved_slot_count,
        resident_slot_count=value.resident_slot_count,
        quarantined_slot_count=value.quarantined_slot_count,
        state=value.state,
        state_reason=value.state_reason,
    )


def namespace_info(value: NamespaceInfo) -> admin.NamespaceInfo:
    """One entry of ListNamespaces."""
    return admin.NamespaceInfo(
        namespace=namespace_ref(value.namespace),
        spec=spec_to_wire(value.spec),
        block_count=value.block_count,
        resident_bytes=value.resident_bytes,
        opened_at=timestamp(value.opened_at),
    )


def lease_info(value: LeaseInfo) -> admin.LeaseInfo:
    """One entry of ListLeases."""
    return admin.LeaseInfo(
        token_prefix=value.token_prefix,
        kind=wire_enum(value.kind),
        instance_id=value.instance_id,
        pid=value.pid,
        namespace=namespace_ref(value.namespace),
        slot_count=value.slot_count,
        open_shards=value.open_shards,
        taken_at=timestamp(value.taken_at),
        expires_after=duration(value.expires_after_s),
        quarantined=value.quarantined,
    )


def block_info(value: BlockInfo | None, hash_bytes: int) -> admin.DescribeBlockResponse:
    """Answer of DescribeBlock."""
    if value is None:
        return admin.DescribeBlockResponse(found=False)
    return admin.DescribeBlockResponse(
        found=True,
        visible=value.visible,
        parent_hash=value.parent_hash[:hash_bytes],
        depth=value.depth,
        child_count=value.child_count,
        copies=[
            admin.CopyInfo(
                tier=wire_enum(copy.tier),
                segment_id=copy.segment_id,
                offset_bytes=copy.offset_bytes,
                state=copy.state,
                lease_count=copy.lease_count,
            )
            for copy in value.copies
        ],
        checksum=value.checksum,
        pinned=value.pinned,
        idle=duration(value.idle_s),
        use_count=value.use_count,
        story=value.story,
    )


def explanation(value: Explanation | None) -> admin.ExplainBlockResponse:
    """Answer of ExplainBlock."""
    if value is None:
        return admin.ExplainBlockResponse(found=False)
    return admin.ExplainBlockResponse(
        found=True,
        policy=value.policy,
        signals=[admin.Signal(name=name, value=words) for name, words in value.signals],
        score=value.score,
        placements=[
            admin.TierPlacement(
                tier=wire_enum(item.tier),
                present=item.present,
                evictable=item.evictable,
                rank=item.rank,
                verdict=item.verdict,
            )
            for item in value.placements
        ],
    )


def event(value: Event) -> admin.WatchEventsResponse:
    """One message of WatchEvents."""
    at = timestamp(value.at)
    if isinstance(value, EventsLost):
        return admin.WatchEventsResponse(at=at, events_lost=admin.EventsLost(count=value.count))
    if isinstance(value, RequestEnded):
        ended = admin.RequestEnded(
            instance_id=value.instance_id,
            request_id=value.request_id,
            output_token_count=value.output_token_count,
            stop_reason=wire_enum(value.stop),
        )
        return admin.WatchEventsResponse(at=at, request_ended=ended)
    if isinstance(value, ConservativeModeChanged):
        changed = admin.ConservativeModeChanged(on=value.on, reason=value.reason)
        return admin.WatchEventsResponse(at=at, conservative_mode_changed=changed)
    spec = value.spec
    began = admin.RequestBegan(
        namespace=namespace_ref(value.namespace),
        block_tokens=spec.block_tokens,
        instance_id=value.instance_id,
        request_id=value.request_id,
        block_hashes=[row.tobytes()[: spec.hash_bytes] for row in value.run],
        kept_block_count=value.kept_count,
    )
    return admin.WatchEventsResponse(at=at, request_began=began)
