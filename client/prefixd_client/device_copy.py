"""Copies between slots and the engine's memory where one of them is GPU memory, or the checksum is LANES_64.

The checksum is over the engine's memory, never over the slot, as in copy.py. Copies go to the engine's own
stream and nothing is said about them before their event has completed. Host memory is read into by way of
memory of our own: a copy that a hung device makes at some later moment must not hit the engine's.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from .copy import Span, read_blocks, write_blocks
from .device import DeviceMap, merged
from .device_memory import DeviceMemory, checksum_of, lanes_64_of
from .layout import Pieces
from .namespace import ChecksumAlgorithm

BATCH_BYTES_MAX = 256 << 20
"""Bytes behind one event: between two, a copy can end because its lease is over."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the blocks of one call travel.

    device is None when everything is host memory; stream is the engine's; on_device tells where the
    engine's memory lies.
    """

    algorithm: ChecksumAlgorithm
    device: DeviceMap | None
    stream: int
    on_device: bool


def read_by(
    way: Way, span: Span, blocks: Sequence[Pieces], checksums: Sequence[int], is_over: Callable[[], bool]
) -> tuple[int, bool]:
    """Reads a span by the way that fits. As copy.read_blocks(); raises DeviceFault as _read_batches()."""
    if way.device is None and way.algorithm is ChecksumAlgorithm.XXH3_64:
        return read_blocks(span, blocks, checksums, is_over)
    return _read_batches(way, span, blocks, checksums, is_over)


def write_by(way: Way, span: Span, blocks: Sequence[Pieces], is_over: Callable[[], bool]) -> list[int]:
    """Writes a span by the way that fits. As copy.write_blocks(); raises DeviceFault as _write_batches()."""
    if way.device is None and way.algorithm is ChecksumAlgorithm.XXH3_64:
        return write_blocks(span, blocks, is_over)
    return _write_batches(way, span, blocks, is_over)


def _read_batches(
    way: Way, span: Span, blocks: Sequence[Pieces], checksums: Sequence[int], is_over: Callable[[], bool]
) -> tuple[int, bool]:
    """Raises DeviceFault: a copy may still be under way, and nothing more may be told of the lease."""
    at_once = _batch_count(blocks)
    for first in range(0, len(blocks), at_once):
        if is_over():
            return first, False
        batch = blocks[first : first + at_once]
        found = _read(way, span.address + first * span.stride_bytes, span.stride_bytes, batch)
        for index, (own, expected) in enumerate(zip(found, checksums[first:], strict=False)):
            if own != expected:
                return first + index, True
    return len(blocks), False


def _write_batches(way: Way, span: Span, blocks: Sequence[Pieces], is_over: Callable[[], bool]) -> list[int]:
    """Raises DeviceFault: a copy may still be under way, and nothing more may be told of the lease."""
    checksums: list[int] = []
    at_once = _batch_count(blocks)
    for first in range(0, len(blocks), at_once):
        if is_over():
            break
        batch = blocks[first : first + at_once]
        sums = _checksums(way, batch)
        slot = span.address + first * span.stride_bytes
        copies = []
        for at, pieces in enumerate(batch):
            copies += _pairs(slot + at * span.stride_bytes, pieces)
        if way.device is None:
            for inside, address, length_bytes in copies:
                ctypes.memmove(inside, address, length_bytes)
        else:
            way.device.copy(copies, way.stream)
        checksums += sums
    return checksums


def _read(way: Way, slot: int, stride_bytes: int, blocks: Sequence[Pieces]) -> list[int]:
    """Copies consecutive slots; the checksums of what arrived."""
    pairs = [
        (address, inside, nbytes)
        for at, pieces in enumerate(blocks)
        for inside, address, nbytes in _pairs(slot + at * stride_bytes, pieces)
    ]
    if way.device is None:
        for address, inside, nbytes in pairs:
            ctypes.memmove(address, inside, nbytes)
    elif way.on_device:
        way.device.copy(pairs, way.stream)
    else:
        staged = way.device.read(slot, stride_bytes * len(blocks), way.stream)
        base = ctypes.addressof(ctypes.c_char.from_buffer(staged))
        for address, inside, nbytes in pairs:
            ctypes.memmove(address, base + inside - slot, nbytes)
    return _checksums(way, blocks)


def _pairs(slot: int, pieces: Pieces) -> list[tuple[int, int, int]]:
    """(address in the slot, address of the piece, bytes) of one block's pieces."""
    pairs = []
    for address, length_bytes in pieces:
        pairs.append((slot, address, length_bytes))
        slot += length_bytes
    return pairs


def _batch_count(blocks: Sequence[Pieces]) -> int:
    return max(1, BATCH_BYTES_MAX // sum(length for _, length in blocks[0])) if blocks else 1


def _checksums(way: Way, blocks: Sequence[Pieces]) -> list[int]:
    """Of blocks in the engine's memory. Its own writes to it must be done, or on the stream given."""
    if not way.on_device:
        return [checksum_of(_host_bytes(pieces), way.algorithm) for pieces in blocks]
    assert way.device is not None, "memory on a device is reached by a device"
    torch = sys.modules.get("torch")
    if way.algorithm is ChecksumAlgorithm.LANES_64 and torch is not None and torch.cuda.is_available():
        return _on_device(torch, way, blocks)
    sums = []
    for pieces in blocks:
        parts = [bytes(way.device.read(address, nbytes, way.stream)) for address, nbytes in pieces]
        sums.append(checksum_of(b"".join(parts), way.algorithm))
    return sums


def _on_device(torch: Any, way: Way, blocks: Sequence[Pieces]) -> list[int]:
    """By the device's own sums, in place where all blocks lie in one piece."""
    assert way.device is not None
    device = torch.device("cuda", way.device.ordinal)
    pairs = [pair for block in blocks for pair in block]
    starts = accumulate((length for _, length in pairs), initial=0)
    pieces = merged([(start, *pair) for start, pair in zip(starts, pairs, strict=False)])
    with torch.cuda.stream(torch.cuda.ExternalStream(way.stream, device=device)):
        parts = [
            torch.as_tensor(DeviceMemory(address, length), device=device) for _, address, length in pieces
        ]
        run = parts[0] if len(parts) == 1 else torch.cat(parts)
        return lanes_64_of(run.view(len(blocks), -1))


def _host_bytes(pieces: Pieces) -> Any:
    """One block's bytes in host memory, in place where they are in one piece."""
    parts = [(ctypes.c_char * nbytes).from_address(address) for address, nbytes in pieces]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.frombuffer(memoryview(part), np.uint8) for part in parts])
