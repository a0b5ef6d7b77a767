"""What the connector cannot serve, told at start and with the remedy.

The prefix law (a block is useless without its ancestors, and needs nothing else) holds for full attention;
KV that depends on later tokens, on a window or on a recurrent state has no place in the cache.
"""

from __future__ import annotations

import os
from typing import Any

from ..engine_settings import UnsupportedEngine

FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
"""Names of vLLM's cache specs that keep every token's KV; MLA keeps one latent vector per token."""

DRAFTS_WITH_KV = ("draft_model", "extract_hidden_states")
"""Methods of speculative decoding, beside EAGLE and MTP, whose draft keeps KV of its own."""

REPRODUCIBLE_HASHES = {"sha256": 32, "sha256_cbor": 32}
"""Hash algorithms whose default seed is the same in every process, and their bytes."""

SEEDED_HASHES = {"xxhash": 16, "xxhash_cbor": 16}
"""Algorithms that are random per process unless PYTHONHASHSEED is set."""


def refuse_unsupported_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UnsupportedEngine when the connector would lie, fail requests or never hit."""
    _refuse_failing_policy(vllm_config.kv_transfer_config)
    _refuse_groups(kv_cache_config.kv_cache_groups)
    _refuse_parallelism(vllm_config.parallel_config)
    _refuse_sleep_on_gpus(vllm_config)
    hash_bytes(vllm_config.cache_config.prefix_caching_hash_algo)
    _refuse_images_named_by_number(vllm_config)
    if not vllm_config.model_config.is_prefix_caching_supported:
        raise UnsupportedEngine(
            "vLLM has no prefix cache for this model and pooling: it fails where some of a prompt is kept",
            "pool the last token, or serve this model without the connector",
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedEngine(
            "calculate_kv_scales gives every engine its own KV scales, so blocks cannot be shared",
            "use a checkpoint with scales, or a kv_cache_dtype without them",
        )
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and (speculative.use_eagle() or speculative.method in DRAFTS_WITH_KV):
        raise UnsupportedEngine(
            f"method {speculative.method} keeps KV that depends on the token behind it, or on another model",
            "start without --speculative-config, or with the ngram method",
        )


def _refuse_images_named_by_number(vllm_config: Any) -> None:
    """With both of its caches off, vLLM hashes no image: it numbers them, anew in each process."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None or vllm_config.cache_config.enable_prefix_caching:
        return
    if multimodal.mm_processor_cache_gb == 0:
        raise UnsupportedEngine(
            "mm_processor_cache_gb = 0 without a prefix cache names images by number, not by content: the KV "
            "of another image would be loaded",
            "leave out --mm-processor-cache-gb 0 or --no-enable-prefix-caching",
        )


def _refuse_failing_policy(transfer: Any) -> None:
    """With vLLM's default policy a block found bad fails its request instead of being recomputed."""
    if transfer.kv_load_failure_policy != "recompute":
        raise UnsupportedEngine(
            f'kv_load_failure_policy = "{transfer.kv_load_failure_policy}" fails a request where the cache '
            "lost a block",
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config',
        )


def _refuse_groups(groups: Any) -> None:
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise UnsupportedEngine(
            f"the model has {len(groups)} KV cache groups ({', '.join(kinds)}): windowed or recurrent layers "
            "do not follow the prefix law",
            "for sliding windows add --disable-hybrid-kv-cache-manager, which keeps every token; recurrent "
            "models (Mamba and alike) are not served",
        )
    for spec in layer_specs(groups[0].kv_cache_spec):
        if type(spec).__name__ not in FULL_ATTENTION:
            raise UnsupportedEngine(
                f"a layer keeps {type(spec).__name__}, not the KV of every token",
                "for sliding windows add --disable-hybrid-kv-cache-manager; other kinds are not served",
            )
        if getattr(spec, "non_causal", False):
            raise UnsupportedEngine(
                "a layer attends to later tokens, so a block depends on what follows it",
                "serve this model without the connector",
            )


def layer_specs(spec: Any) -> list[Any]:
    """The cache specs of a group's layers: one for all, or one each where their sizes differ."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner is not None else [spec]


def _refuse_sleep_on_gpus(vllm_config: Any) -> None:
    """Sleep takes a GPU's KV memory away and tells the workers' connectors nothing: a save may be reading."""
    asleep = getattr(vllm_config.model_config, "enable_sleep_mode", False)
    if asleep and vllm_config.device_config.device_type != "cpu":
        raise UnsupportedEngine(
            "sleep mode unmaps the KV cache on GPUs while a save may be reading it",
            "start without --enable-sleep-mode",
        )


def _refuse_parallelism(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedEngine(
                f"{name} = {getattr(parallel, name)} spreads a block's tokens over ranks",
                "use tensor parallelism alone",
            )


def hash_bytes(algorithm: str) -> int:
    """Bytes of a prefix hash. Raises UnsupportedEngine where processes would disagree about hashes."""
    if algorithm in REPRODUCIBLE_HASHES:
        return REPRODUCIBLE_HASHES[algorithm]
    if algorithm in SEEDED_HASHES:
        if "PYTHONHASHSEED" not in os.environ:
            raise UnsupportedEngine(
                f"prefix hashes of {algorithm} are random in each process: nothing would ever hit",
                "set PYTHONHASHSEED to the same number in every engine, or use "
                "--prefix-caching-hash-algo sha256",
            )
        return SEEDED_HASHES[algorithm]
    raise UnsupportedEngine(
        f"prefix hash algorithm {algorithm!r} is unknown", "use --prefix-caching-hash-algo sha256"
    )
