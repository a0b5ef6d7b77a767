"""A worker of vllm_harness.py whose KV lies in the stand-in driver's memory.

What the "model" computes waits on its stream until somebody waits for it; it is read behind all of that. So a
load that is told too soon, a save that comes too soon and a copy that comes too late are wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from prefixd_client.connectors.vllm.device_copies import DeviceCopies
from prefixd_client.connectors.vllm.kv_memory import KvMemory
from prefixd_client.device_driver import Driver

from tests.support.fake_cuda import uuid_of
from tests.support.stand_in_gpu import StandInGpu
from tests.support.vllm_harness import BLOCK_TOKENS, HEAD_DIM, KV_HEADS, LAYERS, Worker

PART_COUNT = 3
"""Blocks of one staged part: most loads have several."""


class GpuWorker(Worker):
    """One tensor rank on device 0, which ranks may share."""

    device_uuid = uuid_of(0)

    def __init__(self, rank: int, ranks: int, block_count: int) -> None:
        self.rank = rank
        shape = (KV_HEADS // ranks, BLOCK_TOKENS, 2 * HEAD_DIM)
        layers = dict.fromkeys(LAYERS, shape)
        self._gpu = StandInGpu(self.device_uuid, layers, block_count, "torch.float32")
        self._token_bytes = shape[0] * shape[2] * 4
        self.kv: dict[str, Any] = self._gpu.tensors

    def open_copies(self, memory: KvMemory) -> DeviceCopies:  # type: ignore[override]  # needs what it computes on
        return DeviceCopies(
            memory, Driver(self.device_uuid), self._gpu, PART_COUNT * memory.block_bytes, timeout_s=5.0
        )

    def write(self, block: int, offset: int, number: int) -> None:
        """One token's KV: given to the computing stream."""
        for layer, tensor in enumerate(self.kv.values()):
            word = np.uint64((number + self.rank + (layer << 8)) & ((1 << 64) - 1))
            data = np.full(self._token_bytes // 8, word).tobytes()
            address = tensor.data_ptr() + (block * BLOCK_TOKENS + offset) * self._token_bytes
            self._gpu.fill(address, data, self._gpu.compute)

    def holds(self, table: Sequence[int], numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> bool:
        """Whether the first tokens' KV in these blocks is what they wrote."""
        count = len(numbers)
        blocks = list(table[: -(-count // BLOCK_TOKENS)])
        for layer in range(len(self.kv) if blocks else 0):
            pieces = [block[layer] for block in self._gpu.memory.pieces(blocks)]
            found = np.frombuffer(self._gpu.read_pieces(pieces), np.uint64)
            words = found.reshape(-1, self._token_bytes // 8)[:count]
            if not (words == (numbers + np.uint64(self.rank + (layer << 8)))[:, None]).all():
                return False
        return True
