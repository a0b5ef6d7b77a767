"""Checksums of blocks. Every algorithm of the wire stands here; the calls release the GIL while they hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import xxhash

from prefixd_server.base.types import ChecksumAlgorithm, Checksums

LANES_ROW_BYTES = 4096
"""A row of 512 words of 64 bits."""
_LANES_PART_ROWS = 128
"""Rows summed at a time: 512 KiB, which the second sum finds in the CPU's cache."""


def lanes_64(data: memoryview) -> int:
    """LANES_64: XXH3 over the sums of columns, the sums of rows and the length of a grid of words.

    The bytes, padded with zeros to whole rows, are little-endian words of 64 bits in rows of 512; sums are
    modulo 2^64. docs/gpu.md says what is detected. 20 GB/s in numpy on one core.
    """
    raw = np.frombuffer(data, np.uint8)
    if len(raw) % LANES_ROW_BYTES:
        raw = np.concatenate([raw, np.zeros(-len(raw) % LANES_ROW_BYTES, np.uint8)])
    grid = raw.view("<u8").reshape(-1, LANES_ROW_BYTES // 8)
    columns = np.zeros(grid.shape[1], "<u8")
    rows = np.empty(len(grid), "<u8")
    for first in range(0, len(grid), _LANES_PART_ROWS):
        part = grid[first : first + _LANES_PART_ROWS]
        columns += part.sum(axis=0)
        part.sum(axis=1, out=rows[first : first + _LANES_PART_ROWS])
    sums = columns.tobytes() + rows.tobytes() + data.nbytes.to_bytes(8, "little")
    return int(xxhash.xxh3_64_intdigest(sums))


_ALGORITHMS: Mapping[ChecksumAlgorithm, Callable[[memoryview], int]] = {
    ChecksumAlgorithm.XXH3_64: xxhash.xxh3_64_intdigest,
    ChecksumAlgorithm.LANES_64: lanes_64,
}
"""XXH3_64 has seed 0. xxhash 4.1 was seen to release the GIL: two threads hash 1.2 times as fast
as one on two shared cores, and a third runs on."""


def checksum(data: memoryview, algorithm: ChecksumAlgorithm) -> int:
    """The checksum of one block, an unsigned 64-bit number. `data` is contiguous."""
    return _ALGORITHMS[algorithm](data)


def checksums(
    extent: memoryview, stride_bytes: int, block_bytes: int, count: int, algorithm: ChecksumAlgorithm
) -> Checksums:
    """One checksum per block of an extent; what lies between a block's end and the next slot is left out."""
    digest = _ALGORITHMS[algorithm]
    starts = range(0, count * stride_bytes, stride_bytes)
    return np.array([digest(extent[at : at + block_bytes]) for at in starts], dtype=np.uint64)
