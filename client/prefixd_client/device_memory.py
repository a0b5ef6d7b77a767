"""What device memory looks like to an engine: DeviceMemory for its tensors, and checksums of what lies there.

LANES_64, the checksum for engines on GPUs: a block's bytes, padded with zeros to whole rows, are
little-endian words of 64 bits in rows of 512; the checksum is XXH3_64 over the sums of the columns, the sums
of the rows (modulo 2^64) and the length as 64 bits. A device makes both sums at memory speed, and 8 KiB for
2 MiB travel to the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from .copy import checksum_of as xxh3_64
from .errors import InvalidArgument
from .layout import Pieces
from .namespace import ChecksumAlgorithm

ROW_BYTES = 4096
_REMEDY = "give contiguous tensors on the device that the client was opened with"
_PART_ROWS = 128
"""Rows summed at a time on a CPU: 512 KiB, which the second sum finds in its cache."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Contiguous bytes on a GPU, for whoever takes `__cuda_array_interface__`: torch.as_tensor(memory), CuPy,
    Numba. The owner keeps it alive; torch makes DLPack of it where that is wanted."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the protocol: bytes."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def checksum_of(data: Any, algorithm: ChecksumAlgorithm) -> int:
    """The checksum of one block's contiguous bytes in host memory."""
    if algorithm is ChecksumAlgorithm.LANES_64:
        return lanes_64(data)
    return xxh3_64(data)


def device_pieces_of(memory: Any, block_bytes: int) -> Pieces:
    """Addresses of one block's pieces in GPU memory: see layout.pieces_of()."""
    pieces = memory if isinstance(memory, (list, tuple)) else [memory]
    found = tuple(_device_piece(piece) for piece in pieces)
    if sum(length for _, length in found) != block_bytes:
        raise InvalidArgument(
            "block",
            f"{sum(length for _, length in found)} bytes",
            f"a block has {block_bytes} bytes",
            _REMEDY,
        )
    return found


def _device_piece(piece: Any) -> tuple[int, int]:
    described = getattr(piece, "__cuda_array_interface__", None)
    if described is None or described.get("strides") is not None:
        raise InvalidArgument("block", type(piece).__name__, "must be contiguous GPU memory", _REMEDY)
    width = int(described["typestr"][2:])
    return described["data"][0], math.prod(described["shape"]) * width


def is_on_device(memory: object) -> bool:
    """Whether a block's memory, or its first piece, is GPU memory."""
    if isinstance(memory, (list, tuple)):
        return bool(memory) and is_on_device(memory[0])
    return hasattr(memory, "__cuda_array_interface__")


def lanes_64(data: Any) -> int:
    """LANES_64 of contiguous bytes in host memory."""
    raw = np.frombuffer(data, np.uint8)
    length_bytes = len(raw)
    if length_bytes % ROW_BYTES:
        raw = np.concatenate([raw, np.zeros(-length_bytes % ROW_BYTES, np.uint8)])
    grid = raw.view("<u8").reshape(-1, ROW_BYTES // 8)
    columns = np.zeros(grid.shape[1], "<u8")
    rows = np.empty(len(grid), "<u8")
    for first in range(0, len(grid), _PART_ROWS):
        part = grid[first : first + _PART_ROWS]
        columns += part.sum(axis=0)
        part.sum(axis=1, out=rows[first : first + _PART_ROWS])
    return _digest(columns, rows, length_bytes)


def lanes_64_of(blocks: Any) -> list[int]:
    """LANES_64 of each row of a contiguous uint8 tensor, shape (blocks, block bytes), on its own device.

    The sums are made there, one launch each for all blocks, on torch's current stream.
    """
    import torch  # noqa: PLC0415 - the engine's own; a client without tensors has none

    count, length_bytes = blocks.shape
    short = -length_bytes % ROW_BYTES
    if short:
        blocks = torch.nn.functional.pad(blocks, (0, short))
    grid = blocks.view(torch.int64).reshape(count, -1, ROW_BYTES // 8)
    sums = torch.cat([grid.sum(dim=1), grid.sum(dim=2)], dim=1).cpu().numpy()
    columns = ROW_BYTES // 8
    return [_digest(row[:columns], row[columns:], length_bytes) for row in sums]


def _digest(columns: NDArray[Any], rows: NDArray[Any], length_bytes: int) -> int:
    sums = columns.tobytes() + rows.tobytes() + length_bytes.to_bytes(8, "little")
    return int(xxhash.xxh3_64_intdigest(sums))
