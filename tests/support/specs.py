"""Namespace specs for tests."""

from __future__ import annotations

from typing import Any

from prefixd_server.base.types import BlockEncoding, ChecksumAlgorithm, KvGroup, KvGroupKind, NamespaceSpec


def spec(
    model_id: str = "model", block_bytes: int = 65_536, shard_count: int = 1, **changes: Any
) -> NamespaceSpec:
    """A namespace with one full-attention group."""
    values: dict[str, Any] = {
        "model_id": model_id,
        "weights_fingerprint": "revision:1",
        "model_config_fingerprint": "00",
        "tokenizer_fingerprint": "",
        "kv_dtype": "float32",
        "kv_scales_fingerprint": "",
        "kv_layout": "test",
        "attention_backend": "sdpa",
        "cpu_isa_class": "",
        "adapter_fingerprint": "",
        "block_tokens": 16,
        "kv_groups": (KvGroup(KvGroupKind.FULL_ATTENTION, block_bytes, 2),),
        "tensor_parallel_size": shard_count,
        "pipeline_parallel_size": 1,
        "shard_count": shard_count,
        "hash_algorithm": "sha256",
        "hash_seed": "",
        "hash_bytes": 32,
        "engine_name": "test",
        "layout_version": "1",
        "checksum_algorithm": ChecksumAlgorithm.XXH3_64,
        "encoding": BlockEncoding.RAW,
    }
    return NamespaceSpec(**(values | changes))
