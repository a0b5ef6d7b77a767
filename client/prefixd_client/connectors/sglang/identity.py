"""Fills a namespace from an engine: everything the bytes of its KV depend on besides the tokens.

SGLang's key covers tokens, cache salt, extra key, and an adapter by name and path. All else is here, also
what SGLang's own file storage leaves out: type, layout, weights, adapter content, kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefixd_client.namespace import KvGroup, NamespaceSpec, isa_class
from prefixd_client.weights import WEIGHT_PATTERNS, weight_files_in, weight_files_of, weights_fingerprint

from ..engine_settings import UnsupportedEngine
from .chains import KEY_BYTES
from .engine import EngineFacts
from .host_pool import HostPool
from .settings import Settings
from .versions import layout_version

ENGINE_NAME = "sglang"
SET_REVISION = 'add "weights_revision", a name of these weights, to --hicache-storage-backend-extra-config'
FORMATS_OF_FILES = frozenset(
    {"auto", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "gguf", "layered"}
)
"""Load formats whose weights are in the model's files and nowhere else. The others take them from a peer, a
daemon or a store (remote_instance, remote, ipc_cache, runai_streamer), from files of other names (npcache,
sharded_state, presharded, expert_pack, bitsandbytes with an adapter), or from nowhere (dummy)."""


def namespace_spec(
    facts: EngineFacts, storage_config: Any, pool: HostPool, settings: Settings, *, weights: str
) -> NamespaceSpec:
    """The namespace of one pipeline stage of an engine; its shards are the tensor-parallel ranks.

    Stages hold other layers, maybe another number of them: each has a namespace of its own, and SGLang cuts a
    hit to what all stages have.

    Args:
        facts: what SGLang has resolved.
        storage_config: SGLang's HiCacheStorageConfig.
        pool: where the blocks lie.
        settings: the operator's.
        weights: fingerprint of the weights the engine has loaded.
    """
    return NamespaceSpec(
        model_id=settings.model_id or str(storage_config.model_name or facts.model_path),
        weights_fingerprint=weights,
        model_config_fingerprint=facts.config_fingerprint,
        tokenizer_fingerprint=facts.tokenizer,
        kv_dtype=f"{facts.kv_cache_dtype}:{pool.dtype}",
        kv_layout=f"stage={storage_config.pp_rank};{pool.layout_name}",
        kv_scales_fingerprint=_content(facts.kv_scales_path),
        attention_backend=facts.attention_backend,
        cpu_isa_class=isa_class() if facts.device == "cpu" else "",
        adapter_fingerprint=adapters_fingerprint(facts.adapter_paths),
        block_tokens=pool.block_tokens,
        kv_groups=(KvGroup(block_bytes=pool.block_bytes, layer_count=pool.layer_count),),
        tensor_parallel_size=int(storage_config.tp_size),
        pipeline_parallel_size=int(storage_config.pp_size),
        shard_count=1 if storage_config.is_mla_model else int(storage_config.tp_size),
        hash_algorithm="sglang-sha256",
        hash_bytes=KEY_BYTES,
        engine_name=ENGINE_NAME,
        layout_version=layout_version(facts.version),
    )


def shard_of(storage_config: Any) -> int:
    """The shard that this rank reads and writes: MLA's latent vectors are the same on every rank."""
    return 0 if storage_config.is_mla_model else int(storage_config.tp_rank)


def engine_weights(facts: EngineFacts, settings: Settings) -> str:
    """Fingerprint of the base model's weights: the operator's word, else sha256 over the files.

    Raises UnsupportedEngine when the files do not tell what the engine computes with.
    """
    if settings.weights_revision:
        return f"revision:{settings.weights_revision}"
    if facts.load_format not in FORMATS_OF_FILES:
        raise UnsupportedEngine(
            f"the model's files do not tell what load_format {facts.load_format} has loaded", SET_REVISION
        )
    if facts.other_weight_sources:
        raise UnsupportedEngine(
            f"the model's files are not all that it has loaded: {', '.join(facts.other_weight_sources)}",
            SET_REVISION,
        )
    if not facts.was_attached_at_start:
        raise UnsupportedEngine(
            "the storage is attached to a running engine, whose weights may have been updated",
            SET_REVISION,
        )
    return weights_fingerprint(_weight_files(facts))


def adapters_fingerprint(paths: Sequence[str]) -> str:
    """Content of the adapters that the engine was started with, whose keys name them by path; "" for none.

    Adapters that are loaded later have keys of their own in each engine and are not shared.
    """
    if not paths:
        return ""
    files = []
    for path in paths:
        found = [*weight_files_in(Path(path)), *sorted(Path(path).glob("*.json"))]
        if not found:
            raise UnsupportedEngine(
                f"adapter {path}: no files to tell its content by", "give --lora-paths a local directory"
            )
        files += found
    return weights_fingerprint(files)


def _weight_files(facts: EngineFacts) -> list[Path]:
    """The files that hold the model's weights, in a directory or in the Hugging Face cache."""
    found = weight_files_of(facts.model_path, facts.revision, facts.download_dir)
    if not found:
        raise UnsupportedEngine(
            f"{facts.model_path}: no weight files ({', '.join(WEIGHT_PATTERNS)})", SET_REVISION
        )
    return found


def _content(path: str | None) -> str:
    return weights_fingerprint([path]) if path else ""
