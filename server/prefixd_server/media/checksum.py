"""Checksums of blocks. Every algorithm of the wire stands here; the calls release the GIL while they hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import xxhash

from prefixd_server.base.types import ChecksumAlgorithm, Checksums

_ALGORITHMS: Mapping[ChecksumAlgorithm, Callable[[memoryview], int]] = {
    ChecksumAlgorithm.XXH3_64: xxhash.xxh3_64_intdigest,
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
