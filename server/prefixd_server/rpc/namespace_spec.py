"""NamespaceSpec between the wire and the floors, with its checks."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

from prefixd.v1 import types_pb2

from prefixd_server.base.errors import Unsupported
from prefixd_server.base.types import (
    BLOCK_BYTES_MAX,
    BLOCK_TOKENS_MAX,
    KV_GROUP_COUNT_MAX,
    LAYER_COUNT_MAX,
    PART_COUNT_MAX,
    WORLD_SIZE_MAX,
    BlockEncoding,
    ChecksumAlgorithm,
    KvGroup,
    KvGroupKind,
    NamespaceSpec,
)
from prefixd_server.rpc import checks

TEXT_BYTES_MAX = 1024
WEIGHTS_FORMS = ("sha256:", "revision:")

_REQUIRED = (
    "model_id",
    "weights_fingerprint",
    "model_config_fingerprint",
    "kv_dtype",
    "kv_layout",
    "attention_backend",
    "hash_algorithm",
    "engine_name",
    "layout_version",
)
_OPTIONAL = (
    "tokenizer_fingerprint",
    "kv_scales_fingerprint",
    "cpu_isa_class",
    "adapter_fingerprint",
    "hash_seed",
)


def spec_from_wire(message: types_pb2.NamespaceSpec) -> NamespaceSpec:
    """The spec, checked; whether its blocks fit into a segment is the cache floor's to judge.

    Raises:
        InvalidRequest: FIELD_INVALID.
        Unsupported: UNSUPPORTED_KV_GROUP, UNSUPPORTED_CHECKSUM, UNSUPPORTED_ENCODING.
    """
    texts = {name: checks.utf8(f"spec.{name}", getattr(message, name), TEXT_BYTES_MAX) for name in _OPTIONAL}
    texts |= {
        name: checks.utf8(f"spec.{name}", getattr(message, name), TEXT_BYTES_MAX, required=True)
        for name in _REQUIRED
    }
    _check_weights(texts["weights_fingerprint"])
    checks.within("spec.kv_groups count", len(message.kv_groups), 1, KV_GROUP_COUNT_MAX)
    if message.hash_bytes not in {16, 32}:
        raise checks.invalid("spec.hash_bytes", message.hash_bytes, "must be 16 or 32")
    part_count = message.shard_count * len(message.kv_groups)
    if part_count > PART_COUNT_MAX:
        limit = f"times the number of KV groups must be at most {PART_COUNT_MAX:,}"
        raise checks.invalid("spec.shard_count", message.shard_count, limit)
    return NamespaceSpec(
        **texts,
        block_tokens=checks.within("spec.block_tokens", message.block_tokens, 1, BLOCK_TOKENS_MAX),
        kv_groups=tuple(_kv_group(index, group) for index, group in enumerate(message.kv_groups)),
        tensor_parallel_size=checks.within(
            "spec.tensor_parallel_size", message.tensor_parallel_size, 1, WORLD_SIZE_MAX
        ),
        pipeline_parallel_size=checks.within(
            "spec.pipeline_parallel_size", message.pipeline_parallel_size, 1, WORLD_SIZE_MAX
        ),
        shard_count=checks.within("spec.shard_count", message.shard_count, 1, WORLD_SIZE_MAX),
        hash_bytes=message.hash_bytes,
        checksum_algorithm=_checksum_algorithm(message.checksum_algorithm),
        encoding=_encoding(message.encoding),
    )


def spec_to_wire(spec: NamespaceSpec) -> types_pb2.NamespaceSpec:
    """The spec as it goes out."""
    names = (*_REQUIRED, *_OPTIONAL, "block_tokens", "tensor_parallel_size", "pipeline_parallel_size")
    return types_pb2.NamespaceSpec(
        **{name: getattr(spec, name) for name in (*names, "shard_count", "hash_bytes")},
        checksum_algorithm=wire_enum(spec.checksum_algorithm),
        encoding=wire_enum(spec.encoding),
        kv_groups=[
            types_pb2.KvGroup(
                kind=wire_enum(group.kind), block_bytes=group.block_bytes, layer_count=group.layer_count
            )
            for group in spec.kv_groups
        ],
    )


def wire_enum(value: Enum) -> Any:
    """The number of an enum; protobuf takes it, though its stubs ask for a class that does not exist."""
    return value.value


def _values(kind: type[IntEnum]) -> set[int]:
    return {member.value for member in kind}


def _check_weights(value: str) -> None:
    if not any(value.startswith(form) and len(value) > len(form) for form in WEIGHTS_FORMS):
        limit = (
            'must be "sha256:<hex>" over the weight files, or "revision:<text>" that the operator vouches for'
        )
        raise checks.invalid("spec.weights_fingerprint", value, limit)


def _kv_group(index: int, group: types_pb2.KvGroup) -> KvGroup:
    field = f"spec.kv_groups[{index}]"
    if group.kind not in _values(KvGroupKind):
        raise checks.invalid(f"{field}.kind", group.kind, "must be FULL_ATTENTION")
    kind = KvGroupKind(group.kind)
    if kind is not KvGroupKind.FULL_ATTENTION:
        raise Unsupported(
            "UNSUPPORTED_KV_GROUP",
            f"{field}.kind = {kind.name}: only full attention is served, since a prefix of such a group's "
            "blocks is not enough to go on from; turn the cache off for this model",
            field=f"{field}.kind",
            value=kind.name,
        )
    return KvGroup(
        kind,
        checks.within(f"{field}.block_bytes", group.block_bytes, 1, BLOCK_BYTES_MAX),
        checks.within(f"{field}.layer_count", group.layer_count, 1, LAYER_COUNT_MAX),
    )


def _checksum_algorithm(value: int) -> ChecksumAlgorithm:
    if value == 0:
        raise checks.invalid("spec.checksum_algorithm", "unset", "must be XXH3_64 or LANES_64")
    if value not in _values(ChecksumAlgorithm):
        raise Unsupported(
            "UNSUPPORTED_CHECKSUM",
            f"spec.checksum_algorithm = {value} is not served by this version; use XXH3_64 or LANES_64",
            field="spec.checksum_algorithm",
            value=value,
        )
    return ChecksumAlgorithm(value)


def _encoding(value: int) -> BlockEncoding:
    if value == 0:
        raise checks.invalid("spec.encoding", "unset", "must be RAW")
    if value not in _values(BlockEncoding):
        raise Unsupported(
            "UNSUPPORTED_ENCODING",
            f"spec.encoding = {value} is not served by this version; use RAW",
            field="spec.encoding",
            value=value,
        )
    return BlockEncoding(value)
