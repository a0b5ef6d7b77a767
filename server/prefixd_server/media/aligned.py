"""Memory that O_DIRECT takes: buffers, lengths and offsets in whole 4 KiB."""

from __future__ import annotations

import mmap

import numpy as np

from prefixd_server.base.types import SLOT_ALIGNMENT_BYTES


def round_up(length: int) -> int:
    """The next multiple of SLOT_ALIGNMENT_BYTES."""
    return -(-length // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def aligned_buffer(length: int) -> memoryview:
    """Zeroed, writable, page-aligned memory of `length` bytes; it lives as long as its views."""
    return memoryview(mmap.mmap(-1, round_up(max(1, length))))[:length]


def is_aligned(memory: memoryview) -> bool:
    """Whether address and length are whole multiples of SLOT_ALIGNMENT_BYTES."""
    if memory.nbytes % SLOT_ALIGNMENT_BYTES:
        return False
    address: int = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    return address % SLOT_ALIGNMENT_BYTES == 0
