"""Reads SGLang's own configuration in the scheduler's process: what a release changes is changed here.

The storage interface tells a backend its ranks and the served name, not the model; the rest is read where
SGLang keeps what is in effect.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sglang
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig

NAMES_ONLY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of a model configuration that no byte depends on, or that are added resolved."""

APART = frozenset(
    {
        "model_path",
        "revision",
        "download_dir",
        "engine_info_bootstrap_port",
        "model_checksum",
        "startup_weight_load_mode",
        "is_startup_weight_load_overlap",
        "delete_ckpt_after_loading",
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
    }
)
APART_STEMS = ("remote_instance_", "weight_loader_", "weight_cache_", "checkpoint_engine_")
"""Of SGLang's model settings: where weights come from and how, which their own fingerprint answers."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the bytes of an engine's KV depend on, as SGLang has resolved it."""

    version: str
    model_path: str
    revision: str | None
    download_dir: str | None
    load_format: str
    other_weight_sources: tuple[str, ...]
    """Names of the settings that are in effect and bring weights from elsewhere than the model's files."""
    config_fingerprint: str
    tokenizer: str
    kv_cache_dtype: str
    kv_scales_path: str | None
    attention_backend: str
    device: str
    adapter_paths: tuple[str, ...]
    speculative_algorithm: str | None
    is_multimodal: bool
    was_attached_at_start: bool
    """False when the storage is attached to a running engine, whose weights may have been updated since."""

    @classmethod
    def read(cls) -> EngineFacts:
        """Reads them. Raises ValueError outside of an SGLang engine."""
        arguments = runtime_context.get_server_args()
        model, execution = runtime_context.get_model(), runtime_context.get_exec()
        config = ModelConfig.from_server_args(arguments)
        kernel, lora = execution.kernel, runtime_context.get_lora()
        backends = (
            kernel.attention_backend,
            kernel.prefill_attention_backend,
            kernel.decode_attention_backend,
        )
        return cls(
            version=str(sglang.__version__),
            model_path=str(model.model_path),
            revision=model.revision,
            download_dir=model.download_dir,
            load_format=str(model.load_format),
            other_weight_sources=_other_weight_sources(model, execution),
            config_fingerprint=_config_fingerprint(config, model, execution),
            tokenizer=f"{arguments.tokenizer_path or model.model_path}@{model.revision or ''}",
            kv_cache_dtype=str(model.kv_cache_dtype),
            kv_scales_path=model.quantization_param_path,
            attention_backend=";".join(str(name or "") for name in backends),
            device=str(runtime_context.get_device().device),
            adapter_paths=tuple(adapter.lora_path for adapter in lora.lora_paths or ()),
            speculative_algorithm=runtime_context.get_spec().speculative_algorithm,
            is_multimodal=bool(config.is_multimodal),
            was_attached_at_start=runtime_context.get_memory().hicache_storage_backend is not None,
        )


def _other_weight_sources(model: Any, execution: Any) -> tuple[str, ...]:
    sources = {
        "weight_cache_mode": model.weight_cache_mode != "off",
        "modelopt_checkpoint_restore_path": model.modelopt_checkpoint_restore_path,
        "modelopt_quant": model.modelopt_quant,
        "kt_weight_path": execution.moe.kt_weight_path,
    }
    return tuple(name for name, is_in_effect in sources.items() if is_in_effect)


def _config_fingerprint(config: Any, model: Any, execution: Any) -> str:
    """sha256 (hex) of the resolved model configuration, of SGLang's settings for it, and of the kernels."""
    resolved = {key: value for key, value in config.hf_config.to_dict().items() if key not in NAMES_ONLY}
    settings = {
        name: value
        for name, value in _leaves(model)
        if name not in APART and not name.startswith(APART_STEMS)
    }
    kernels = {
        group: dict(_leaves(getattr(execution, group)))
        for group in ("kernel", "moe", "comm", "deterministic")
    }
    rounding = (execution.features.enable_tf32_matmul, execution.graph.enable_torch_compile)
    canonical = json.dumps(
        {
            "model": resolved,
            "computes_in": str(config.dtype),
            "settings": settings,
            "kernels": kernels,
            "rounding": rounding,
        },
        sort_keys=True,
        separators=(",", ":"),
        default=str,
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def _leaves(bag: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of one group of settings."""
    fields: Mapping[str, Any] = bag._fields
    yield from fields.items()
