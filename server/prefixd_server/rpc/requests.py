"""Requests of CacheService, checked and turned into the floors' own values.

Every check of a request stands here or in checks.py, so that what the cache
floor gets is well-formed. What needs the catalog to judge (unknown namespace,
lease of another) is the cache floor's to raise. NamespaceSpec has its own room,
namespace_spec.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2

from prefixd_server.base.errors import InvalidRequest
from prefixd_server.base.types import (
    HASH_COUNT_MAX,
    BadBlock,
    Checksums,
    LeaseRelease,
    NamespaceRef,
    NamespaceSpec,
    PrefetchRun,
    RequestPhase,
    StopReason,
    Tier,
    UsageReport,
)
from prefixd_server.cache.turns import Turns
from prefixd_server.rpc import checks

FINGERPRINT_BYTES = 32
TOKEN_COUNT_MAX = 4096
REPORT_COUNT_MAX = 1024
ENTRIES_IN_A_TURN = 32
"""Entries of a long list that are read in one step."""
PREFETCH_COUNT_MAX = 64
"""Runs of one Prefetch."""
NAME_BYTES_MAX = 128
DEVICE_COUNT_MAX = 64

SpecOf = Callable[[NamespaceRef], NamespaceSpec]
"""The spec of a namespace of the tenant; raises NotFound or StateConflict."""


class NamesNamespace(Protocol):
    """Any request that names a namespace."""

    @property
    def namespace(self) -> types_pb2.NamespaceRef:
        """As it came."""
        ...


@dataclass(frozen=True, slots=True)
class Hello:
    """Who opens a session."""

    instance_id: str
    engine_name: str
    client_version: str
    pid: int
    readable_devices: frozenset[str]


def namespace_ref(ref: types_pb2.NamespaceRef) -> NamespaceRef:
    """A NamespaceRef of the right form; whether it exists is not asked here."""
    return NamespaceRef(
        checks.exactly("namespace.fingerprint", ref.fingerprint, FINGERPRINT_BYTES), ref.epoch
    )


def hello(message: wire.OpenSessionRequest) -> Hello:
    """The first message of a session."""
    if message.WhichOneof("message") != "hello":
        raise InvalidRequest(
            "HELLO_MISSING", "the first message of OpenSession must be hello; send it first", field="hello"
        )
    body = message.hello
    return Hello(
        checks.utf8("hello.instance_id", body.instance_id, NAME_BYTES_MAX, required=True),
        checks.utf8("hello.engine_name", body.engine_name, NAME_BYTES_MAX),
        checks.utf8("hello.client_version", body.client_version, NAME_BYTES_MAX),
        body.pid,
        _devices(body.readable_devices),
    )


def _devices(names: Sequence[str]) -> frozenset[str]:
    """UUIDs of GPUs, few and short: what they are is compared and nothing else."""
    checks.within("hello.readable_devices", len(names), 0, DEVICE_COUNT_MAX)
    return frozenset(checks.utf8("hello.readable_devices", name, NAME_BYTES_MAX) for name in names)


def wanted_tier(value: int) -> Tier:
    """Where a Reserve would write."""
    if value not in {0, Tier.DRAM, Tier.HBM}:
        raise checks.invalid("wanted_tier", value, "must be TIER_HBM or TIER_DRAM")
    return Tier(value or Tier.DRAM)


def heartbeat(message: wire.OpenSessionRequest) -> list[bytes]:
    """Tokens to renew."""
    if message.WhichOneof("message") != "heartbeat":
        raise InvalidRequest(
            "HEARTBEAT_EXPECTED",
            "every message of OpenSession after the first must be heartbeat",
            field="heartbeat",
        )
    tokens = list(message.heartbeat.renew_tokens)
    checks.within("heartbeat.renew_tokens count", len(tokens), 0, TOKEN_COUNT_MAX)
    return [checks.exactly("heartbeat.renew_tokens", token, checks.ID_BYTES) for token in tokens]


def session_id(value: bytes) -> bytes:
    """A session id of the right form."""
    return checks.exactly("session_id", value, checks.ID_BYTES)


def token(value: bytes) -> bytes:
    """A lease token of the right form."""
    return checks.exactly("token", value, checks.ID_BYTES)


def chosen_token(value: bytes) -> bytes:
    """The token that a caller has chosen for its lease; empty: the daemon is to choose."""
    return token(value) if value else b""


def shard(value: int, spec: NamespaceSpec) -> int:
    """A shard of the namespace. Raises InvalidRequest SHARD_OUT_OF_RANGE."""
    if value >= spec.shard_count:
        raise InvalidRequest(
            "SHARD_OUT_OF_RANGE",
            f"shard = {value}: this namespace has shards 0 to {spec.shard_count - 1}",
            field="shard",
            value=value,
            limit=spec.shard_count - 1,
        )
    return value


def kv_group(value: int, spec: NamespaceSpec) -> int:
    """A KV group of the namespace. Raises InvalidRequest KV_GROUP_OUT_OF_RANGE."""
    if value >= len(spec.kv_groups):
        raise InvalidRequest(
            "KV_GROUP_OUT_OF_RANGE",
            f"kv_group = {value}: this namespace has KV groups 0 to {len(spec.kv_groups) - 1}",
            field="kv_group",
            value=value,
            limit=len(spec.kv_groups) - 1,
        )
    return value


def redeem_shards(values: Iterable[int], spec: NamespaceSpec) -> tuple[int, ...]:
    """Distinct shards of the namespace."""
    shards = tuple(shard(value, spec) for value in list(values)[: spec.shard_count + 1])
    if len(set(shards)) != len(shards):
        raise checks.invalid("redeem_shards", list(shards), "must not name a shard twice")
    return shards


def skip_count(value: int, run_length: int) -> int:
    """Blocks that the engine has itself."""
    if value >= run_length:
        raise checks.invalid("skip_block_count", value, f"must be less than the run's length, {run_length:,}")
    return value


def checksums(values: Iterable[int]) -> Checksums:
    """One checksum per block, at least one. Raises InvalidRequest CHECKSUM_MISSING."""
    packed = np.fromiter(values, dtype=np.uint64)
    if len(packed) == 0:
        raise checksum_missing("checksums")
    checks.within("checksums count", len(packed), 1, HASH_COUNT_MAX)
    return packed


def checksum_missing(field: str) -> InvalidRequest:
    """CHECKSUM_MISSING."""
    return InvalidRequest(
        "CHECKSUM_MISSING",
        f"{field} is missing: each block needs its checksum, XXH3_64 (seed 0) over the engine's own memory",
        field=field,
    )


def releases(messages: Sequence[wire.LeaseRelease]) -> Turns[list[LeaseRelease]]:
    """Entries of a Release; shards and bad blocks are bounded over the request: each costs work."""
    checks.within("releases count", len(messages), 1, TOKEN_COUNT_MAX)
    entries, bad_count, shard_count = [], 0, 0
    for number, entry in enumerate(messages, 1):
        bad_count = checks.within("bad_blocks count", bad_count + len(entry.bad_blocks), 0, HASH_COUNT_MAX)
        shard_count = checks.within("shards count", shard_count + len(entry.shards), 0, HASH_COUNT_MAX)
        token = checks.exactly("releases.token", entry.token, checks.ID_BYTES)
        bad = tuple(BadBlock(bad.shard, bad.kv_group, bad.block_index) for bad in entry.bad_blocks)
        entries.append(LeaseRelease(token, tuple(entry.shards), bad))
        if number % ENTRIES_IN_A_TURN == 0:
            yield
    return entries


def tokens(values: Iterable[bytes]) -> list[bytes]:
    """Ids of prefetches of the right form."""
    given = list(values)
    checks.within("prefetch_ids count", len(given), 1, TOKEN_COUNT_MAX)
    return [checks.exactly("prefetch_ids", value, checks.ID_BYTES) for value in given]


def prefetch_target(value: int) -> None:
    """The tier to bring runs to. Raises InvalidRequest FIELD_INVALID."""
    if value not in {types_pb2.TIER_UNSPECIFIED, types_pb2.TIER_DRAM}:
        raise checks.invalid(
            "target_tier", value, "must be TIER_DRAM: what is used is brought further by use"
        )


def prefetch_runs(messages: Iterable[wire.PrefetchRun], spec_of: SpecOf) -> list[PrefetchRun]:
    """Runs of a Prefetch; they have at most 16,384 blocks together."""
    entries = list(messages)
    checks.within("runs count", len(entries), 1, PREFETCH_COUNT_MAX)
    hash_count = sum(len(entry.block_hashes) for entry in entries)
    if hash_count > HASH_COUNT_MAX:
        raise checks.too_many_hashes(hash_count)
    runs = []
    for entry in entries:
        ref = namespace_ref(entry.namespace)
        hashes = checks.run(entry, spec_of(ref).hash_bytes)
        runs.append(PrefetchRun(ref, hashes, entry.queue_position, checks.span_s(entry, "deadline")))
    return runs


def reports(
    messages: Sequence[wire.UsageReport], spec_of: SpecOf, *, allow_none: bool = False
) -> Turns[list[UsageReport]]:
    """Usage reports; their runs together have at most 16,384 blocks."""
    checks.within("reports count", len(messages), 0 if allow_none else 1, REPORT_COUNT_MAX)
    hash_count = sum(len(entry.block_hashes) for entry in messages)
    if hash_count > HASH_COUNT_MAX:
        raise checks.too_many_hashes(hash_count)
    entries = []
    for number, entry in enumerate(messages, 1):
        entries.append(_report(entry, spec_of))
        if number % ENTRIES_IN_A_TURN == 0:
            yield
    return entries


def _report(entry: wire.UsageReport, spec_of: SpecOf) -> UsageReport:
    ref = namespace_ref(entry.namespace)
    spec = spec_of(ref)
    if entry.phase not in {phase.value for phase in RequestPhase}:
        raise checks.invalid("reports.phase", entry.phase, "must be QUEUED, STARTED or FINISHED")
    known_reason = entry.stop_reason in {reason.value for reason in StopReason}
    return UsageReport(
        namespace=ref,
        request_id=checks.utf8("reports.request_id", entry.request_id, NAME_BYTES_MAX, required=True),
        phase=RequestPhase(entry.phase),
        hashes=checks.run(entry, spec.hash_bytes) if entry.block_hashes else None,
        queue_position=entry.queue_position,
        engine_hit_block_count=entry.engine_hit_block_count,
        output_token_count=entry.output_token_count,
        stop_reason=StopReason(entry.stop_reason) if known_reason else StopReason.UNKNOWN,
        decode_latency_s=checks.span_s(entry, "decode_latency", allow_zero=True),
        prefill_time_s=checks.span_s(entry, "prefill_time", allow_zero=True),
        prefill_token_count=entry.prefill_token_count,
        attention_mass=_attention_mass(entry),
    )


def _attention_mass(entry: wire.UsageReport) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    if not entry.attention_mass:
        return None
    mass = np.fromiter(entry.attention_mass, dtype=np.float32)
    if len(mass) != len(entry.block_hashes):
        raise checks.invalid(
            "reports.attention_mass", f"{len(mass)} values", "must have one value per block of the run"
        )
    total = float(mass.sum(dtype=np.float64))
    if not math.isfinite(total) or mass.min() < 0 or total > 1.001:
        raise checks.invalid(
            "reports.attention_mass", f"sum {total:g}", "must be 0 or more each, at most 1 in sum"
        )
    return mass
