"""SGLang's own host pools, controller steps and file storage, for tests that compare a storage with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from prefixd_client.connectors.sglang import PrefixdHiCache
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str

LAYERS, HEADS, HEAD_DIM = 3, 2, 16
TOKENS = 16
"""Of a block; 6 KiB of KV in bfloat16."""
ROOM_BLOCKS = 40


def host_pool(layout: str, dtype: torch.dtype = torch.bfloat16, *, heads: int = HEADS) -> Any:
    """SGLang's host pool of keys and values per head, filled with noise."""
    shape, rows = (heads, HEAD_DIM), ROOM_BLOCKS * TOKENS
    k, v = (tuple(torch.zeros(rows, *shape, dtype=dtype) for _ in range(LAYERS)) for _ in range(2))
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=_addresses(k), v_data_ptrs=_addresses(v), layout=next(iter(KVBufferLayout))
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=TOKENS,
        head_num=heads,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=TOKENS,
        layout=layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=rows,
        start_layer=0,
        end_layer=LAYERS,
    )
    return scrambled(pool)


def latent_pool(layout: str) -> Any:
    """SGLang's host pool of one latent vector per token (MLA), the same on every tensor-parallel rank."""
    rank, rope, rows = 24, 8, ROOM_BLOCKS * TOKENS
    rows_of_layers = tuple(torch.zeros(rows, 1, rank + rope, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows_of_layers,
        data_ptrs=_addresses(rows_of_layers),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=TOKENS,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    pool = MLATokenToKVPoolHost(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=TOKENS,
        layout=layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=rows,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )
    return scrambled(pool)


def scrambled(pool: Any, seed: int = 0) -> Any:
    """The pool with other noise in it."""
    random = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=random).to(pool.dtype))
    return pool


def storage_config(**changes: Any) -> HiCacheStorageConfig:
    """One rank of one; `extra` adds settings."""
    extra = changes.pop("extra", {})
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "tiny",
        "extra_config": {
            "backend_name": "prefixd",
            "module_path": "prefixd_client.connectors.sglang",
            "class_name": "PrefixdHiCache",
            "interface_v1": 1,
        }
        | extra,
    }
    return HiCacheStorageConfig(**(fields | changes))


def attached(pool: Any, config: HiCacheStorageConfig, *, is_complete: bool = True) -> PrefixdHiCache:
    """Our storage as SGLang's controller attaches it; not complete while further pools may come."""
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    made.register_mem_host_pool_v2(pool, "kv")
    if is_complete:
        made.on_host_pools_registered()
    return made


def file_storage(pool: Any, config: HiCacheStorageConfig, directory: Path) -> HiCacheFile:
    """SGLang's reference."""
    made = HiCacheFile(config, str(directory))
    made.register_mem_pool_host(pool)
    return made


def keys(count: int, seed: int = 0, after: str | None = None) -> list[str]:
    """The keys of a prompt, made by SGLang."""
    tokens = [(seed * 7919 + index * 31) % 32_000 for index in range(count * TOKENS)]
    found: list[str] = get_hash_str(tokens, after, page_size=TOKENS)
    return found


def behind(*prefix: str) -> HiCacheStorageExtraInfo:
    """What SGLang passes along: the keys before a call's own."""
    return HiCacheStorageExtraInfo(prefix_keys=list(prefix))


class Controller:
    """The steps of SGLang's controller over one storage: its own functions, bound to a pool and a storage.

    Args:
        storage: what they call.
        pool: the host pool.
        zero_copy: by the calls of interface_v1; else by those that copy flat tensors.
    """

    def __init__(self, storage: Any, pool: Any, *, zero_copy: bool) -> None:
        self.storage = storage
        self.pool = pool
        self._self = SimpleNamespace(storage_backend=storage, storage_host_pool=pool, page_size=TOKENS)
        kind = ("_page_get_zero_copy", "_page_set_zero_copy")
        get, put = kind if zero_copy else ("_generic_page_get", "_generic_page_set")
        self._get, self._set = getattr(HiCacheController, get), getattr(HiCacheController, put)

    def hits(self, run: list[str], *prefix: str) -> int:
        """Leading blocks in storage."""
        return int(self.storage.batch_exists(run, behind(*prefix)))

    def save(self, run: list[str], indices: torch.Tensor, *prefix: str) -> bool:
        """Whether all are stored."""
        return bool(self._set(self._self, run, indices, behind(*prefix)))

    def load(self, run: list[str], indices: torch.Tensor, *prefix: str) -> int:
        """Leading blocks that came."""
        operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
        return int(self._get(self._self, operation, run, indices, behind(*prefix)))

    def room(self, blocks: int) -> torch.Tensor:
        """Indices of that many blocks of the pool."""
        return self.pool.alloc(blocks * TOKENS)

    def bytes_at(self, indices: torch.Tensor) -> list[bytes]:
        """What lies there, block by block."""
        return [
            self.pool.get_data_page(int(first)).contiguous().view(torch.uint8).numpy().tobytes()
            for first in indices[::TOKENS]
        ]


def _addresses(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
