"""Stands in for sgl_kernel, which needs a GPU: SGLang's control flow is its own, these are the device copies.

The three copies between host pool and device pool that the "direct" I/O backend uses are written in torch;
memory is not registered with CUDA; any other kernel that is called raises.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

__version__ = "0.4.10"
PATCHED = ("sglang.srt.mem_cache.pool_host.common", "sglang.srt.mem_cache.pool_host.mha")


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError(f"sgl_kernel is a stand-in here, without {name}")

    return kernel


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Token by token, where both sides are layer first."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer from the host ([page, layer, page_size, heads, dim]) to the device ([token, heads, dim])."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        for first, at in _pages(src_indices, dst_indices, page_size):
            rows = source[first // page_size, layer_id]
            target[at : at + page_size].copy_(rows.view(page_size, *target.shape[1:]))


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers from the device (K layers, then V layers) to the host."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for part, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[part * layers + layer]
            for first, at in _pages(src_indices, dst_indices, page_size):
                rows = target[at // page_size, layer].view(page_size, *source.shape[1:])
                rows.copy_(source[first : first + page_size])


def _pages(sources: torch.Tensor, targets: torch.Tensor, page_size: int) -> list[tuple[int, int]]:
    """First token of each page, on both sides."""
    firsts = (index.view(-1, page_size)[:, 0].tolist() for index in (sources, targets))
    return list(zip(*firsts, strict=True))


def _patch(module: ModuleType) -> None:
    if module.__name__.endswith(".common"):
        vars(module)["_cuda_host_register"] = lambda *_args, **_kwargs: None
        return
    for copy in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
        vars(module)[copy.__name__] = copy


class _Patching(importlib.abc.MetaPathFinder):
    """Patches SGLang's host pools right after their import."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in PATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


sys.meta_path.insert(0, _Patching())
