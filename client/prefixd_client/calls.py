"""The pure rules of calls: arguments checked, messages built, answers read, lease time reckoned.

An answer that does not make sense raises AnswerRejected: its sender is broken, and the caller gets a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from google.protobuf.duration_pb2 import Duration
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2

from .errors import InvalidArgument
from .namespace import NamespaceSpec, wire_enum
from .values import (
    Committed,
    DeclineReason,
    Extent,
    PrefetchStatus,
    ReserveOutcome,
    RunHits,
    Tier,
    UsageReport,
)

LEASE_SHARE_USED = 0.8
"""Of a lease's life, counted from before it was asked for: clocks drift and threads are put to sleep."""
MAX_WAIT_S = 10.0
"""Longest wait for blocks of a slower tier that the daemon grants."""
SHARED_MEMORY_TIERS = frozenset({types_pb2.TIER_HBM, types_pb2.TIER_DRAM})
"""Tiers whose extents this client can map."""


class AnswerRejected(Exception):
    """The daemon's answer contradicts itself or the request."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease as the daemon gave it; usable until `until`, monotonic seconds."""

    token: bytes
    until: float


def usable_until(sent_at: float, expires_after: Duration) -> float:
    """When to stop using a lease: 80 % of its life, counted from before the request was sent."""
    return sent_at + LEASE_SHARE_USED * expires_after.ToNanoseconds() / 1e9


def duration(seconds: float | None) -> Duration | None:
    """Seconds as the wire has them; None stays None."""
    if seconds is None:
        return None
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


def seconds_of(message: Any, field: str) -> float | None:
    """A Duration field in seconds; None when absent."""
    return getattr(message, field).ToNanoseconds() / 1e9 if message.HasField(field) else None


def _latest(spans: Sequence[float | None]) -> float | None:
    """The longest; None when one is not known."""
    known = [span for span in spans if span is not None]
    return max(known, default=0.0) if len(known) == len(spans) else None


# -- checks of arguments ------------------------------------------------------------------------


def checked_hashes(hashes: Sequence[bytes], spec: NamespaceSpec, field: str = "hashes") -> list[bytes]:
    """The hashes as a list. Raises InvalidArgument when one is not bytes of the namespace's length."""
    run = list(hashes)
    if not set(map(type, run)) <= {bytes}:
        raise InvalidArgument(field, "other types", "hashes are bytes objects", "convert them with bytes()")
    if run and set(map(len, run)) != {spec.hash_bytes}:
        wrong = next(key for key in run if len(key) != spec.hash_bytes)
        raise InvalidArgument(
            field,
            f"{len(wrong)} bytes",
            f"this namespace's hashes have {spec.hash_bytes} bytes",
            "check hash_bytes",
        )
    return run


def block_bytes_of(spec: NamespaceSpec, shard: int, kv_group: int) -> int:
    """Bytes of one block. Raises InvalidArgument when shard or KV group is not the namespace's."""
    if not 0 <= shard < spec.shard_count:
        raise InvalidArgument("shard", shard, f"must be 0 to {spec.shard_count - 1}", "check shard_count")
    if not 0 <= kv_group < len(spec.kv_groups):
        raise InvalidArgument(
            "kv_group", kv_group, f"must be 0 to {len(spec.kv_groups) - 1}", "check kv_groups"
        )
    return spec.kv_groups[kv_group].block_bytes


def checked_wait(max_wait_s: float) -> float:
    """The wait that is asked for, at most MAX_WAIT_S. Raises InvalidArgument."""
    if not 0 <= max_wait_s < float("inf"):
        raise InvalidArgument("max_wait_s", max_wait_s, "must be 0 or more seconds", "give a finite wait")
    return min(max_wait_s, MAX_WAIT_S)


# -- answers ------------------------------------------------------------------------------------


def run_hits(answer: wire.LookupResponse | wire.AcquireResponse, asked: int, beyond: int) -> RunHits:
    """Hits of a Lookup or an Acquire; `beyond` blocks were not sent and count as misses."""
    hits = tuple((Tier(hit.tier), hit.block_count) for hit in answer.hits)
    if isinstance(answer, wire.AcquireResponse):
        after_s = seconds_of(answer, "ready_after") if answer.pending_block_count else 0.0
    else:
        after_s = _latest([seconds_of(entry, "ready_after") for entry in answer.readiness])
    run = RunHits(hits, answer.pending_block_count, answer.miss_block_count + beyond, after_s)
    if run.hit_count + run.pending_count + run.miss_count != asked + beyond:
        raise AnswerRejected(f"hits, pending and misses of {asked} blocks add up to {run}")
    return run


def prefetch_status_of(answer: wire.PrefetchResponse, asked: int, beyond: int) -> PrefetchStatus:
    """The status of the one run of a Prefetch; `beyond` blocks were not sent and count as misses."""
    if len(answer.runs) != 1:
        raise AnswerRejected(f"a prefetch of one run answered {len(answer.runs)}")
    (entry,) = answer.runs
    status = PrefetchStatus(
        entry.prefetch_id,
        entry.ready_block_count,
        entry.pending_block_count,
        entry.miss_block_count + beyond,
        seconds_of(entry, "ready_after"),
    )
    if status.ready_count + status.pending_count + status.miss_count != asked + beyond:
        raise AnswerRejected(f"ready, pending and misses of {asked} blocks add up to {status}")
    return status


def extents_of(
    messages: Iterable[types_pb2.Extent], block_bytes: int, asked: int, *, with_checksums: bool
) -> tuple[Extent, ...]:
    """Extents in run order. Raises AnswerRejected: they overlap, go beyond the run, lack checksums."""
    extents: list[Extent] = []
    next_block = 0
    for message in messages:
        if message.tier not in SHARED_MEMORY_TIERS:
            raise AnswerRejected(f"extent in tier {message.tier}, which this client cannot map")
        extent = Extent(
            message.segment_id,
            message.offset_bytes,
            message.stride_bytes,
            message.first_block,
            message.block_count,
            tuple(message.checksums),
        )
        expected_checksums = extent.block_count if with_checksums else 0
        if (
            extent.stride_bytes < block_bytes
            or not next_block <= extent.first_block < extent.end_block <= asked
            or len(extent.checksums) != expected_checksums
        ):
            raise AnswerRejected(f"extent that makes no sense: {extent}"[:300])
        next_block = extent.end_block
        extents.append(extent)
    return tuple(extents)


def read_extents(
    answer: wire.AcquireResponse | wire.RedeemResponse, spec: NamespaceSpec, asked: int
) -> dict[tuple[int, int], tuple[Extent, ...]]:
    """Extents by (shard, KV group); in each they are without gaps."""
    found = {}
    for entry in answer.shard_extents:
        if entry.shard >= spec.shard_count or entry.kv_group >= len(spec.kv_groups):
            raise AnswerRejected(
                f"extents of shard {entry.shard}, KV group {entry.kv_group}, which do not exist"
            )
        block_bytes = spec.kv_groups[entry.kv_group].block_bytes
        extents = extents_of(entry.extents, block_bytes, asked, with_checksums=True)
        if any(after.first_block != before.end_block for before, after in pairwise(extents)):
            raise AnswerRejected("extents of a read lease leave blocks out")
        found[entry.shard, entry.kv_group] = extents
    return found


def grant_of(lease: types_pb2.Lease, boot_id: bytes, sent_at: float) -> Grant:
    """The lease. Raises AnswerRejected when it comes from another boot than the session."""
    if lease.boot_id != boot_id:
        raise AnswerRejected("lease of another boot of the daemon than this session's")
    return Grant(lease.token, usable_until(sent_at, lease.expires_after))


def outcomes_of(answer: wire.ReserveResponse, asked: int, beyond: int) -> tuple[ReserveOutcome, ...]:
    """One outcome per block; blocks beyond the limit of one request are DECLINED."""
    outcomes: list[ReserveOutcome] = []
    for entry in answer.outcomes:
        if len(outcomes) + entry.block_count > asked:
            break
        outcomes.extend([ReserveOutcome(entry.outcome)] * entry.block_count)
    if len(outcomes) != asked:
        raise AnswerRejected(f"outcomes of {asked} blocks cover {len(outcomes)}")
    return (*outcomes, *[ReserveOutcome.DECLINED] * beyond)


def decline_reason_of(answer: wire.ReserveResponse | wire.PutResponse) -> DeclineReason:
    """Why blocks were declined."""
    return DeclineReason(answer.decline_reason)


def committed_of(answer: wire.CommitResponse, sent: int) -> Committed:
    """The counts of a Commit. Raises AnswerRejected when they do not add up."""
    committed = Committed(answer.visible_count, answer.waiting_count, answer.dropped_count)
    if committed.visible + committed.waiting + committed.dropped != sent:
        raise AnswerRejected(f"a commit of {sent} blocks answered {committed}")
    return committed


# -- requests -----------------------------------------------------------------------------------


def usage_message(report: UsageReport, spec: NamespaceSpec) -> wire.UsageReport:
    """A usage report as the wire has it, but for the namespace's ref. Raises InvalidArgument."""
    checked_hashes(report.block_hashes, spec, "block_hashes")
    try:
        return _usage_message(report)
    except (TypeError, ValueError) as error:
        raise InvalidArgument("report", report, str(error), "see UsageReport") from error


def _usage_message(report: UsageReport) -> wire.UsageReport:
    return wire.UsageReport(
        request_id=report.request_id,
        phase=wire_enum(report.phase),
        block_hashes=report.block_hashes,
        queue_position=report.queue_position,
        engine_hit_block_count=report.engine_hit_block_count,
        output_token_count=report.output_token_count,
        stop_reason=wire_enum(report.stop_reason),
        decode_latency=duration(report.decode_latency_s),
        prefill_time=duration(report.prefill_time_s),
        prefill_token_count=report.prefill_token_count,
        attention_mass=report.attention_mass,
    )
