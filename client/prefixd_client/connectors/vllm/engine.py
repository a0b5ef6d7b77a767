"""Reads vLLM's own objects: what a release changes of them is changed here and in versions.py."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

from .settings import Settings


def worker_ranks() -> tuple[int, int]:
    """(pipeline rank, tensor rank) of this worker."""
    return int(get_pp_group().rank_in_group), int(get_tp_group().rank_in_group)


def worker_device(settings: Settings) -> str:
    """UUID of this worker's GPU, "GPU-..."; empty on CPUs."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - resolved late in a worker's start

    if not current_platform.is_cuda():
        return ""
    named = settings.device_of(int(get_world_group().local_rank))
    return named or f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def uses_blocks_early(vllm_config: Any) -> bool:
    """Whether vLLM uses a block that is loaded within a step before it is known to be right.

    As seen in 0.32: its own prefix cache lets other requests hit such a block. When it is not right, the
    request that loaded it is to compute it; an abort or a preemption before that leaves it in the cache, and
    others read bytes that are not theirs. And where a step is scheduled while the one before is under way
    (asynchronous scheduling, pipelines), it has read the block and its token is kept.
    """
    return bool(vllm_config.cache_config.enable_prefix_caching) or int(vllm_config.max_concurrent_batches) > 1


def group_layer_names(kv_cache_config: Any) -> list[str]:
    """The layers of the one KV cache group, in its order."""
    return list(kv_cache_config.kv_cache_groups[0].layer_names)


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """The model's attention layers by name."""
    return dict(vllm_config.compilation_config.static_forward_context)


def kv_cache_layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """vLLM's name for the order of dimensions; empty where a release has none."""
    for config in (kv_cache_config, vllm_config.cache_config):
        name = getattr(config, "kv_cache_layout", None)
        if name:
            return str(name)
    return ""


def attention_isa(vllm_config: Any, kv_cache_config: Any) -> str:
    """How the CPU kernels order a block's inside, which the tensors' shape does not tell; empty on GPUs."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - resolved late in a worker's start

    if not current_platform.is_cpu():
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - imports CPU kernels

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    cache = vllm_config.cache_config
    head_size = getattr(spec, "head_size", None)
    return str(_get_attn_isa(vllm_config.model_config.dtype, cache.block_size, head_size, cache.cache_dtype))
