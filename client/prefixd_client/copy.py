"""Moves one block between a slot and the engine's memory, and computes its checksum.

The checksum is XXH3_64 over the engine's memory, never over the slot (law 1): a write hashes before it
copies, a read copies before it hashes. Both go piece by piece, large pieces in parts that still lie in the
CPU's cache for the second pass. ctypes.memmove and xxhash release the GIL.
"""

from __future__ import annotations

import ctypes
from ctypes import memmove
from functools import lru_cache

import xxhash

from .layout import Pieces

PART_BYTES = 1 << 20
"""Copied, then hashed, at a time: fits a core's second-level cache. From this size on memmove also writes
past the cache without reading the target first; parts of half the size were measured at half the speed."""


@lru_cache(maxsize=1024)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """A ctypes array type of a size; making one costs more than hashing a small piece."""
    return ctypes.c_char * nbytes


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """A buffer over memory that the caller keeps alive."""
    return _array_type(nbytes).from_address(address)


def read_block(slot: int, pieces: Pieces) -> int:
    """Copies a slot into the engine's memory; returns the checksum of what arrived there.

    Args:
        slot: address of the slot; it must hold as many bytes as the pieces.
        pieces: the engine's memory.
    """
    if len(pieces) == 1 and pieces[0][1] < 2 * PART_BYTES:
        address, nbytes = pieces[0]
        memmove(address, slot, nbytes)
        return int(xxhash.xxh3_64_intdigest(_memory(address, nbytes)))
    digest = xxhash.xxh3_64()
    for piece, size in pieces:
        address, left = piece, size
        while left:
            part = left if left < 2 * PART_BYTES else PART_BYTES
            memmove(address, slot, part)
            digest.update(_memory(address, part))
            address, slot, left = address + part, slot + part, left - part
    return int(digest.intdigest())


def write_block(slot: int, pieces: Pieces) -> int:
    """Copies the engine's memory into a slot; returns the checksum of the engine's memory."""
    if len(pieces) == 1 and pieces[0][1] < 2 * PART_BYTES:
        address, nbytes = pieces[0]
        checksum = xxhash.xxh3_64_intdigest(_memory(address, nbytes))
        memmove(slot, address, nbytes)
        return int(checksum)
    digest = xxhash.xxh3_64()
    for piece, size in pieces:
        address, left = piece, size
        while left:
            part = left if left < 2 * PART_BYTES else PART_BYTES
            digest.update(_memory(address, part))
            memmove(slot, address, part)
            address, slot, left = address + part, slot + part, left - part
    return int(digest.intdigest())


def checksum_of(data: bytes | bytearray | memoryview) -> int:
    """XXH3_64, seed 0, of contiguous bytes."""
    return int(xxhash.xxh3_64_intdigest(data))
