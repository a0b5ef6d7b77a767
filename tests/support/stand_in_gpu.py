"""An engine's GPU over the stand-in driver: its paged KV cache, its stream, and torch's part of copies."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prefixd_client.connectors.vllm.kv_memory import KvMemory
from prefixd_client.device_driver import Driver
from prefixd_client.device_memory import DeviceMemory

ENDED_TIMEOUT_S = 20.0
WIDTHS = {"torch.float16": 2, "torch.float32": 4}


class Gate:
    """Where a copy from or to the paged cache can be stopped by a test."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.reached = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.is_open.wait(ENDED_TIMEOUT_S)


class StandInTensor:
    """What copies read of a tensor: one layer's part of an allocation, block after block."""

    def __init__(self, address: int, shape: Sequence[int], dtype: str) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = SimpleNamespace(type="cuda", index=0)
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return WIDTHS[self.dtype]

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dimension: int) -> int:
        return math.prod(self.shape[dimension + 1 :])


class StandInGpu:
    """KV in the stand-in's memory; what is computed waits on its stream until somebody waits for it."""

    def __init__(self, uuid: str, layers: Mapping[str, Sequence[int]], block_count: int, dtype: str) -> None:
        self.driver = Driver(uuid)
        self.compute = self.driver.stream()
        self.gate = Gate()
        self._kept: list[bytearray] = []
        sizes = {name: block_count * math.prod(shape) * WIDTHS[dtype] for name, shape in layers.items()}
        self._address = at = self.driver.allocate(sum(sizes.values()))
        self.tensors: dict[str, Any] = {}
        for name, shape in layers.items():
            self.tensors[name] = StandInTensor(at, (block_count, *shape), dtype)
            at += sizes[name]
        self.memory = KvMemory.of(self.tensors, list(layers), block_count)

    def write(self, block: int, data: bytes) -> None:
        """Computes a block: given to the stream, not waited for."""
        at = 0
        for address, length in self.memory.pieces([block])[0]:
            self.fill(address, data[at : at + length], self.compute)
            at += length

    def fill(self, address: int, data: bytes, stream: int) -> None:
        """Has a stream copy bytes to the device."""
        self._kept.append(bytearray(data))
        source = ctypes.addressof(ctypes.c_char.from_buffer(self._kept[-1]))
        self.driver.copy(address, source, len(data), stream)

    def read(self, block: int) -> bytes:
        """What the engine finds in a block."""
        return self.read_pieces(self.memory.pieces([block])[0])

    def read_pieces(self, pieces: Sequence[tuple[int, int]]) -> bytes:
        """What the engine finds there; all that it was given to compute is done then."""
        found = self.read_at(pieces, self.compute)
        self._kept.clear()
        return found

    def peek(self, address: int) -> bytes:
        """A block's bytes at an address of the device, on a stream that follows no other."""
        stream = self.driver.stream()
        found = self.read_at([(address, self.memory.block_bytes)], stream)
        self.driver.end_stream(stream)
        return found

    def read_at(self, pieces: Sequence[tuple[int, int]], stream: int) -> bytes:
        """Bytes of the device, behind what the stream was given."""
        found = bytearray(sum(length for _, length in pieces))
        target = ctypes.addressof(ctypes.c_char.from_buffer(found))
        for address, length in pieces:
            self.driver.copy(target, address, length, stream)
            target += length
        self.finish(stream)
        return bytes(found)

    def finish(self, stream: int) -> None:
        """Returns when the stream has done what it was given."""
        with self.driver._current():
            self.driver._call("cuStreamSynchronize", stream)

    def mark(self) -> int:
        """An event behind what was computed so far."""
        event = self.driver.event()
        self.driver.record(event, self.compute)
        return event

    def close(self) -> None:
        """Gives everything back."""
        self.read(0)
        self.driver.end_stream(self.compute)
        self.driver.free(self._address)
        self.driver.release()

    # -- Paging --------------------------------------------------------------------------------------

    def compute_stream(self) -> int:
        return self.compute

    def gather(self, block_ids: Sequence[int], run: DeviceMemory, stream: int) -> None:
        self.gate.pass_through()
        at = run.address
        for address, length in (piece for pieces in self.memory.pieces(block_ids) for piece in pieces):
            self.driver.copy(at, address, length, stream)
            at += length

    def scatter(self, run: DeviceMemory, block_ids: Sequence[int], stream: int) -> None:
        self.gate.pass_through()
        at = run.address
        for address, length in (piece for pieces in self.memory.pieces(block_ids) for piece in pieces):
            self.driver.copy(address, at, length, stream)
            at += length
