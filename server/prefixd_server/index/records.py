"""The records of the index: format constants and codec, both columnar.

A block record is one fixed-size row, its key first: what RocksDB stores under
row[:KEY_BYTES] is row[KEY_BYTES:]. Rows travel and are kept as numpy structured
arrays, so that a run is encoded and a million records are decoded without
Python work per field. A namespace record is the one other kind.

Every record carries the format version and an XXH3_64 over key and value: one
that does not match is ignored, counted and deleted. Little-endian throughout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from prefixd_server.base.types import (
    BLOCK_BYTES_MAX,
    BLOCK_TOKENS_MAX,
    HASH_BYTES_MAX,
    KV_GROUP_COUNT_MAX,
    LAYER_COUNT_MAX,
    PART_COUNT_MAX,
    WORLD_SIZE_MAX,
    BlockEncoding,
    ChecksumAlgorithm,
    Hashes,
    KvGroup,
    KvGroupKind,
    NamespaceSpec,
)

RECORD_VERSION = 1
KIND_BLOCK = ord("b")
KIND_NAMESPACE = ord("n")
KIND_STORE = ord("s")
"""First byte of every key. Kinds sort apart, so that each can be iterated alone."""
IDENTITY_BYTES = 32

_KEY_FIELDS = [("kind", "u1", ()), ("space", "u1", (IDENTITY_BYTES,)), ("hash", "<u8", (4,))]
KEY = np.dtype(_KEY_FIELDS)
"""Key of a block: the identity of its space (space_identity), and its prefix hash."""
RECORD = np.dtype(
    [
        *_KEY_FIELDS,
        ("version", "u1"),
        ("flags", "u1"),
        ("algorithm", "u1"),
        ("encoding", "u1"),
        ("block_bytes", "<u4"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("depth", "<u4"),
        ("use_count", "<u4"),
        ("last_use", "<f8"),
        ("recompute_cost", "<f4"),
        ("reserved", "<u4"),
        ("parent", "<u8", (4,)),
        ("store_uuid", "u1", (16,)),
        ("check", "<u8"),
    ]
)
"""One block in one slot. slot: place in the segment, in slots of its size; depth: blocks before it;
last_use: wall clock, seconds; recompute_cost: seconds; parent: hash of the block before, zeros at depth 0."""
KEY_BYTES = KEY.itemsize
NAMESPACE_KEY_BYTES = 1 + IDENTITY_BYTES
RECORD_BYTES = RECORD.itemsize
CHECK_BYTES = 8

FLAG_PINNED = 1
FINGERPRINT_BYTES = 32
EPOCH_MAX = 2**63
_COUNTS = {
    "block_tokens": BLOCK_TOKENS_MAX,
    "tensor_parallel_size": WORLD_SIZE_MAX,
    "pipeline_parallel_size": WORLD_SIZE_MAX,
    "shard_count": WORLD_SIZE_MAX,
    "hash_bytes": HASH_BYTES_MAX,
}
"""Fields of a spec that are numbers, with their maxima."""

Records: TypeAlias = NDArray[np.void]
"""Rows of dtype RECORD."""
Keys: TypeAlias = NDArray[np.void]
"""Rows of dtype KEY."""

_CHECK = struct.Struct("<Q")
_NAMESPACE_HEAD = struct.Struct("<B")


class RecordError(ValueError):
    """A record that does not match its checksum, or of a format not read here."""


class RecordVersionError(RecordError):
    """A whole record, of a format not read here."""


def space_identity(tenant: str, fingerprint: bytes, epoch: int, shard: int, kv_group: int) -> bytes:
    """sha256 over what a space stands for; lengths are fixed or stated, so no two spaces share an input."""
    name = tenant.encode()
    head = struct.pack("<H32sQII", len(name), fingerprint, epoch, shard, kv_group)
    return hashlib.sha256(b"prefixd-space-v1\n" + head + name).digest()


def new_records(space: bytes, hashes: Hashes, store_uuid: bytes) -> Records:
    """Rows for blocks of one space, keys and constants filled in; the rest is the caller's, then seal()."""
    records = np.zeros(len(hashes), dtype=RECORD)
    records["kind"] = KIND_BLOCK
    records["space"] = np.frombuffer(space, dtype=np.uint8)
    records["hash"] = hashes
    records["version"] = RECORD_VERSION
    records["algorithm"] = ChecksumAlgorithm.XXH3_64
    records["encoding"] = BlockEncoding.RAW
    records["store_uuid"] = np.frombuffer(store_uuid, dtype=np.uint8)
    return records


def block_keys(space: bytes, hashes: Hashes) -> Keys:
    """Keys of blocks of one space, for deletes."""
    keys = np.zeros(len(hashes), dtype=KEY)
    keys["kind"] = KIND_BLOCK
    keys["space"] = np.frombuffer(space, dtype=np.uint8)
    keys["hash"] = hashes
    return keys


def keys_of(records: Records) -> Keys:
    """The keys of some records."""
    keys = np.empty(len(records), dtype=KEY)
    for name in ("kind", "space", "hash"):
        keys[name] = records[name]
    return keys


def seal(records: Records) -> None:
    """Fills in the check of every row; nothing may change after."""
    records["check"] = _checks(records.tobytes(), len(records))


def intact(rows: bytes, count: int) -> NDArray[np.bool_]:
    """Which of `count` packed rows match their check."""
    matching: NDArray[np.bool_] = _checks(rows, count) == records_from(rows)["check"]
    return matching


def records_from(rows: bytes | memoryview) -> Records:
    """Packed rows as an array, without a copy."""
    return np.frombuffer(rows, dtype=RECORD)


def _checks(rows: bytes, count: int) -> NDArray[np.uint64]:
    digest, view, covered = xxhash.xxh3_64_intdigest, memoryview(rows), RECORD_BYTES - CHECK_BYTES
    starts = range(0, count * RECORD_BYTES, RECORD_BYTES)
    return np.array([digest(view[at : at + covered]) for at in starts], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A namespace at its current epoch. spec is None once it was dropped: only the epoch to open at remains.

    opened_at: wall clock, seconds.
    """

    tenant: str
    fingerprint: bytes
    epoch: int
    spec: NamespaceSpec | None
    opened_at: float

    def key(self) -> bytes:
        """Key of the record: one per tenant and fingerprint, whatever the epoch."""
        name = self.tenant.encode()
        identity = hashlib.sha256(b"prefixd-namespace-record-v1\n" + self.fingerprint + name).digest()
        return bytes([KIND_NAMESPACE]) + identity

    def encode(self) -> bytes:
        """The value: version, JSON, check."""
        content = {
            "tenant": self.tenant,
            "fingerprint": self.fingerprint.hex(),
            "epoch": self.epoch,
            "opened_at": self.opened_at,
            "spec": dataclasses.asdict(self.spec) if self.spec else None,
        }
        return checked(self.key(), json.dumps(content).encode())

    def spaces(self) -> dict[bytes, tuple[int, int]]:
        """Identity of every space that the namespace can have -> (shard, kv_group); none once dropped."""
        if self.spec is None:
            return {}
        return {
            space_identity(self.tenant, self.fingerprint, self.epoch, shard, kv_group): (shard, kv_group)
            for shard in range(self.spec.shard_count)
            for kv_group in range(len(self.spec.kv_groups))
        }


def decode_namespace(key: bytes, value: bytes) -> NamespaceRecord:
    """A namespace record, every field of which is one that a namespace can have. Raises RecordError."""
    content = unchecked(key, value)
    try:
        record = _namespace(json.loads(content))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"not what a namespace record holds: {error!r}") from error
    if record.key() != key:
        raise RecordError("a namespace record under another's key")
    return record


def _namespace(found: dict[str, Any]) -> NamespaceRecord:
    """Raises ValueError and what any wrong type raises."""
    fingerprint, epoch, opened_at = bytes.fromhex(found["fingerprint"]), found["epoch"], found["opened_at"]
    spec = _spec(found["spec"]) if found["spec"] is not None else None
    sound = (
        isinstance(found["tenant"], str)
        and len(fingerprint) == FINGERPRINT_BYTES
        and _is_count(epoch, EPOCH_MAX)
        and isinstance(opened_at, int | float)
        and math.isfinite(opened_at)
    )
    if not sound or (spec is not None and spec.fingerprint() != fingerprint):
        raise ValueError("a field is out of range, or the fingerprint is not the spec's")
    return NamespaceRecord(found["tenant"], fingerprint, epoch, spec, opened_at)


def _is_count(value: object, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= maximum


def checked(key: bytes, content: bytes) -> bytes:
    """A value of variable length: version, content, check."""
    body = _NAMESPACE_HEAD.pack(RECORD_VERSION) + content
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(key + body))


def unchecked(key: bytes, value: bytes) -> bytes:
    """The content of a checked() value. Raises RecordError."""
    if len(value) < _NAMESPACE_HEAD.size + CHECK_BYTES:
        raise RecordError(f"a value of {len(value)} bytes")
    body, (check,) = value[:-CHECK_BYTES], _CHECK.unpack(value[-CHECK_BYTES:])
    if check != xxhash.xxh3_64_intdigest(key + body):
        raise RecordError("a record does not match its checksum")
    if body[0] != RECORD_VERSION:
        raise RecordVersionError(f"a record of version {body[0]}; this release reads {RECORD_VERSION}")
    return body[_NAMESPACE_HEAD.size :]


def distinct_spaces(records: Records) -> Iterable[tuple[bytes, slice]]:
    """(space identity, its rows) for records in key order, as load() gives them."""
    if not len(records):
        return
    words = np.ascontiguousarray(records["space"]).view("<u8")
    edges = (np.flatnonzero((words[1:] != words[:-1]).any(axis=1)) + 1).tolist()
    for start, end in zip([0, *edges], [*edges, len(records)], strict=True):
        yield records["space"][start].tobytes(), slice(start, end)


def _spec(found: dict[str, Any]) -> NamespaceSpec:
    groups = tuple(
        KvGroup(KvGroupKind(group["kind"]), group["block_bytes"], group["layer_count"])
        for group in found.pop("kv_groups")
    )
    algorithm = ChecksumAlgorithm(found.pop("checksum_algorithm"))
    encoding = BlockEncoding(found.pop("encoding"))
    spec = NamespaceSpec(**found, kv_groups=groups, checksum_algorithm=algorithm, encoding=encoding)
    sound = (
        all(isinstance(value, str) for name, value in found.items() if name not in _COUNTS)
        and all(_is_count(found[name], maximum) for name, maximum in _COUNTS.items())
        and 1 <= len(groups) <= KV_GROUP_COUNT_MAX
        and spec.shard_count * len(groups) <= PART_COUNT_MAX
        and all(_is_count(group.block_bytes, BLOCK_BYTES_MAX) for group in groups)
        and all(_is_count(group.layer_count, LAYER_COUNT_MAX) for group in groups)
    )
    if not sound:
        raise ValueError("a field of the spec is out of range")
    return spec
