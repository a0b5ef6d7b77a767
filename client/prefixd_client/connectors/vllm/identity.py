"""Fills a namespace from an engine: everything the bytes of its KV depend on besides the tokens.

The engine's prefix hash covers tokens, images, prompt embeddings, cache salt, and an adapter by name and
path. All else is here. Both sides of the connector contribute: the workers tell how their memory looks
(WorkerFacts, sent once at start), the scheduler knows the model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from prefixd_client.namespace import ChecksumAlgorithm, KvGroup, NamespaceSpec
from prefixd_client.weights import WEIGHT_PATTERNS, weight_files_in, weight_files_of, weights_fingerprint

from ..engine_settings import UnsupportedEngine
from .kv_memory import LayerLayout
from .refusals import hash_bytes
from .settings import Settings
from .shards import ShardPlan
from .versions import layout_version

ENGINE_NAME = "vllm"
NAMES_ONLY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of a model configuration that no byte depends on, or that are added resolved."""
ARITHMETIC = {"VLLM_FLOAT32_MATMUL_PRECISION": "highest", "VLLM_BATCH_INVARIANT": "0"}
"""Environment variables of vLLM's that KV's last bits depend on, and what they are unset."""
FORMATS_OF_FILES = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt"}
)
"""Load formats whose weights are in the model's files and nowhere else. The others take them from a peer, a
daemon or a store (modelexpress, ipc_cache, runai_streamer, tensorizer), from files of other names (npcache,
sharded_state, gguf in parts, bitsandbytes with an adapter), from nowhere (dummy), or are a plugin's."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """How one worker's KV cache looks; the same on every rank of an engine that can be served."""

    layouts: tuple[LayerLayout, ...]
    attention_backend: str
    cpu_isa_class: str
    on_device: bool = False
    """On a GPU, which computes checksums of its own kind."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, all its layers."""
        return sum(layout.block_bytes for layout in self.layouts)

    @property
    def layout_name(self) -> str:
        """Name of the byte layout: readable, and exact through its digest."""
        first = self.layouts[0]
        digest = hashlib.sha256(repr(self.layouts).encode()).hexdigest()[:16]
        return f"{len(self.layouts)}x{first.dtype}{list(first.shape)}/{list(first.strides)};{digest}"


def agreed_facts(facts: Mapping[tuple[int, int], WorkerFacts]) -> WorkerFacts:
    """The facts of all ranks. Raises UnsupportedEngine when they differ: a namespace has one block size."""
    first_rank, first = next(iter(facts.items()))
    for rank, other in facts.items():
        if other != first:
            raise UnsupportedEngine(
                f"rank (pipeline, tensor) = {rank} lays its KV out in another way than rank {first_rank}",
                "choose pipeline and tensor parallel sizes that divide layers and heads evenly",
            )
    return first


def namespace_spec(
    vllm_config: Any,
    facts: WorkerFacts,
    plan: ShardPlan,
    settings: Settings,
    *,
    weights: str,
    version: str,
    kv_cache_layout: str,
) -> NamespaceSpec:
    """The namespace of an engine's KV without an adapter.

    Args:
        vllm_config: vLLM's resolved configuration.
        facts: what the workers agree on.
        plan: which ranks' bytes differ.
        settings: the operator's.
        weights: fingerprint of the weights the engine has loaded.
        version: vLLM's own.
        kv_cache_layout: vLLM's name of the layout, empty where it has none.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    kv_dtype = facts.layouts[0].dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype)
    return NamespaceSpec(
        model_id=settings.model_id or str(model.model),
        weights_fingerprint=weights,
        model_config_fingerprint=model_config_fingerprint(vllm_config),
        tokenizer_fingerprint=f"{model.tokenizer}@{model.tokenizer_revision or ''}",
        kv_dtype=kv_dtype,
        kv_layout=f"{kv_cache_layout};{facts.layout_name}",
        attention_backend=facts.attention_backend,
        cpu_isa_class=facts.cpu_isa_class,
        block_tokens=int(cache.block_size),
        kv_groups=(KvGroup(block_bytes=facts.block_bytes, layer_count=len(facts.layouts)),),
        tensor_parallel_size=int(vllm_config.parallel_config.tensor_parallel_size),
        pipeline_parallel_size=int(vllm_config.parallel_config.pipeline_parallel_size),
        shard_count=plan.shard_count,
        hash_algorithm=f"vllm-{cache.prefix_caching_hash_algo}",
        hash_seed=os.environ.get("PYTHONHASHSEED", ""),
        hash_bytes=hash_bytes(cache.prefix_caching_hash_algo),
        engine_name=ENGINE_NAME,
        layout_version=layout_version(version),
        checksum_algorithm=ChecksumAlgorithm.LANES_64 if facts.on_device else ChecksumAlgorithm.XXH3_64,
    )


def model_config_fingerprint(vllm_config: Any) -> str:
    """sha256 (hex) of the resolved configuration: RoPE, overrides, windows, quantisation, compute type.

    With the load format, which chooses among the files of a directory, and the settings that choose among
    kernels which round in other ways.
    """
    model = vllm_config.model_config
    resolved = {key: value for key, value in model.hf_config.to_dict().items() if key not in NAMES_ONLY}
    resolved["prefixd"] = {
        "computes_in": str(model.dtype),
        "quantization": str(model.quantization),
        "implementation": str(getattr(model, "model_impl", "")),
        "sliding_window": str(model.get_sliding_window()),
        "load_format": str(vllm_config.load_config.load_format),
        "attention": _attention_settings(vllm_config),
        "compiled": str(getattr(vllm_config.compilation_config, "mode", "")),
        "arithmetic": {name: os.environ.get(name, unset) for name, unset in ARITHMETIC.items()},
    }
    if (multimodal := model.multimodal_config) is not None:
        # A request's own options are in its hashes; the engine's are merged with them later.
        resolved["prefixd"]["sees_by"] = {
            "image_processor": model.hf_image_processor_config,
            "processor": multimodal.mm_processor_kwargs,
            "media": multimodal.media_io_kwargs,
        }
    canonical = json.dumps(resolved, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _attention_settings(vllm_config: Any) -> dict[str, Any]:
    """But for the backend, which is told resolved."""
    config = getattr(vllm_config, "attention_config", None)
    settings = {} if config is None else {field.name: getattr(config, field.name) for field in fields(config)}
    settings.pop("backend", None)
    return settings


def engine_weights(vllm_config: Any, settings: Settings) -> str:
    """Fingerprint of the base model's weights: the operator's word, else sha256 over the files.

    Raises UnsupportedEngine when the files do not tell what the engine computes with.
    """
    if settings.weights_revision:
        return f"revision:{settings.weights_revision}"
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in FORMATS_OF_FILES:
        raise UnsupportedEngine(
            f"the model's files do not tell what load_format {load_format} has loaded",
            "set kv_connector_extra_config.weights_revision to a name of these weights",
        )
    return weights_fingerprint(weight_files(vllm_config))


def weight_files(vllm_config: Any) -> list[Path]:
    """The files that hold the model's weights, in a directory or in the Hugging Face cache."""
    model = vllm_config.model_config
    name = str(model.model)
    found = weight_files_of(name, model.revision, vllm_config.load_config.download_dir)
    if not found:
        raise UnsupportedEngine(
            f"{name}: no weight files ({', '.join(WEIGHT_PATTERNS)})",
            "set kv_connector_extra_config.weights_revision to the revision that this engine runs",
        )
    return found


def adapter_fingerprint(path: str) -> str:
    """Content of an adapter's files. Raises OSError when they cannot be read."""
    return weights_fingerprint(adapter_files(path))


def adapter_files(path: str) -> list[Path]:
    """Everything in an adapter's directory that shapes its effect: weights and configuration."""
    directory = Path(path)
    return sorted([*weight_files_in(directory), *directory.glob("*.json")])


def files_signature(files: Iterable[Path]) -> tuple[tuple[str, int, int, int], ...]:
    """What changes when a file is replaced or rewritten: name, inode, size, time in ns."""
    stats = [(path.name, path.stat()) for path in files]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
