"""The engine's torch on its GPU, as far as copies need it: see device_copies.Paging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from prefixd_client.device_driver import DeviceFault
from prefixd_client.device_memory import DeviceMemory
from prefixd_client.device_paged import gather, scatter

from .kv_memory import KvMemory

WORD_BYTES = 8


class TorchPaging:
    """Paging by torch's own kernels, one launch a layer. The KV cache is on a GPU."""

    def __init__(self, memory: KvMemory) -> None:
        self._device = memory.tensors[0].device
        rows = rows_of(memory)
        in_words = all(_is_in_words(layer) for layer in rows)
        self._word = torch.int64 if in_words else torch.uint8
        self._layers = [layer.view(self._word) for layer in rows]

    def compute_stream(self) -> int:
        """See Paging."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def gather(self, block_ids: Sequence[int], run: DeviceMemory, stream: int) -> None:
        """See Paging."""
        with self._on(stream):
            gather(self._layers, self._ids(block_ids), self._blocks(run, len(block_ids)))

    def scatter(self, run: DeviceMemory, block_ids: Sequence[int], stream: int) -> None:
        """See Paging."""
        with self._on(stream):
            scatter(self._blocks(run, len(block_ids)), self._layers, self._ids(block_ids))

    def _ids(self, block_ids: Sequence[int]) -> Any:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._device)

    def _blocks(self, run: DeviceMemory, count: int) -> Any:
        return torch.as_tensor(run, device=self._device).view(count, -1).view(self._word)

    @contextmanager
    def _on(self, stream: int) -> Iterator[None]:
        """What torch launches meanwhile goes to the stream; a device that fails is told as one.

        In inference mode, in which vLLM makes its KV cache: elsewhere torch may refuse to write to it.
        """
        try:
            ours: Any = torch.cuda.ExternalStream
            with torch.inference_mode(), torch.cuda.stream(ours(stream, device=self._device)):
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise DeviceFault("TORCH", str(error)) from error


def rows_of(memory: KvMemory) -> list[Any]:
    """Each layer's blocks as rows of bytes, uint8, shape (blocks, block bytes), in whatever order their
    dimensions lie; the same memory."""
    found = []
    for tensor, layout, stride in zip(memory.tensors, memory.layouts, memory.strides.tolist(), strict=True):
        start = tensor.storage_offset() * tensor.element_size()
        shape = (memory.block_count, layout.block_bytes)
        rows = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        found.append(rows.set_(tensor.untyped_storage(), start, shape, (stride, 1)))
    return found


def _is_in_words(rows: Any) -> bool:
    places = (rows.storage_offset(), rows.stride(0), rows.shape[1])
    return not any(place % WORD_BYTES for place in places)
