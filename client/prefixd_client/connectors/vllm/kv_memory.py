"""Where the blocks of an engine's paged KV cache lie: addresses for the client library to copy from and to.

One tensor per layer, first dimension the block. What a block's inside means belongs to the engine (on CPUs
its shape does not even tell the order); the bytes of one block of one layer only have to be dense. A block
of the cache is its layers' bytes in the order of the KV cache group. In host memory or on one GPU: who copies
which is in kv_copies.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixd_client.layout import Pieces

from ..engine_settings import UnsupportedEngine

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer's block: shape and strides in elements without the block dimension, and the element type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    block_bytes: int

    @property
    def dense(self) -> bool:
        """Whether the block's elements fill its bytes without gaps, in whatever order of dimensions."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The registered KV cache of one worker.

    bases and strides hold, per layer, the address of block 0 and the bytes from one block to the next.
    tensors keeps the memory alive. on_device: it is a GPU's.
    """

    layouts: tuple[LayerLayout, ...]
    bases: np.ndarray[Any, np.dtype[np.int64]]
    strides: np.ndarray[Any, np.dtype[np.int64]]
    block_count: int
    tensors: tuple[Any, ...]
    on_device: bool = False

    @classmethod
    def of(cls, kv_caches: Mapping[str, Any], layer_names: Sequence[str], block_count: int) -> KvMemory:
        """Reads what vLLM registers.

        Args:
            kv_caches: tensor per layer name, as register_kv_caches() gets them.
            layer_names: the KV cache group's order; layers that share another's tensor count once.
            block_count: blocks that the scheduler knows.

        Raises:
            UnsupportedEngine: memory that cannot be copied block by block.
        """
        tensors: list[Any] = []
        seen: set[int] = set()
        for name in [name for name in layer_names if name in kv_caches]:
            tensor = kv_caches[name]
            _refuse_unreachable(name, tensor, block_count)
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensors.append(tensor)
        if not tensors:
            raise UnsupportedEngine(
                "this worker registered no KV cache", "serve this model without the connector"
            )
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1:
            raise UnsupportedEngine(
                f"this worker keeps its KV on {', '.join(sorted(devices))}",
                "give each worker one device",
            )
        layouts = tuple(_layout_of(tensor, block_count) for tensor in tensors)
        if not all(layout.dense for layout in layouts):
            raise UnsupportedEngine(
                "the bytes of a block are scattered in this KV cache layout", "set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        return cls(
            layouts=layouts,
            bases=np.array([tensor.data_ptr() for tensor in tensors], np.int64),
            strides=np.array([_block_stride_bytes(tensor, block_count) for tensor in tensors], np.int64),
            block_count=block_count,
            tensors=tuple(tensors),
            on_device=tensors[0].device.type != "cpu",
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(layout.block_bytes for layout in self.layouts)

    def pieces(self, block_ids: Sequence[int]) -> list[Pieces]:
        """Addresses of blocks: per block one (address, bytes) for each layer.

        Raises:
            IndexError: an id outside the KV cache.
        """
        ids = np.asarray(block_ids, np.int64)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.block_count):
            raise IndexError(
                f"block ids {ids.min()} to {ids.max()} in a KV cache of {self.block_count} blocks"
            )
        addresses = (self.bases[None, :] + ids[:, None] * self.strides[None, :]).tolist()
        sizes = [layout.block_bytes for layout in self.layouts]
        return [tuple(zip(row, sizes, strict=True)) for row in addresses]


def _block_stride_bytes(tensor: Any, block_count: int) -> int:
    """From one of the scheduler's blocks to the next. An attention backend may split each into several of its
    own, which follow each other."""
    return int(tensor.stride(0)) * (int(tensor.shape[0]) // block_count) * int(tensor.element_size())


def _layout_of(tensor: Any, block_count: int) -> LayerLayout:
    parts = int(tensor.shape[0]) // block_count
    shape = tuple(int(size) for size in tensor.shape[1:])
    strides = tuple(int(tensor.stride(dimension)) for dimension in range(1, tensor.dim()))
    if parts > 1:
        shape, strides = (parts, *shape), (int(tensor.stride(0)), *strides)
    return LayerLayout(
        shape=shape,
        strides=strides,
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_bytes=math.prod(shape) * int(tensor.element_size()),
    )


def _refuse_unreachable(name: str, tensor: Any, block_count: int) -> None:
    if not hasattr(tensor, "data_ptr"):
        raise UnsupportedEngine(
            f"layer {name} registers {type(tensor).__name__}, not one tensor",
            "serve this model without the connector",
        )
    if tensor.device.type not in DEVICES:
        raise UnsupportedEngine(
            f"layer {name} keeps its KV on {tensor.device}", f"run the engine on one of {', '.join(DEVICES)}"
        )
    if int(tensor.shape[0]) < block_count or int(tensor.shape[0]) % block_count:
        raise UnsupportedEngine(
            f"layer {name} has {tensor.shape[0]} blocks where the scheduler has {block_count}",
            "choose an attention backend that keeps blocks in the first dimension",
        )
