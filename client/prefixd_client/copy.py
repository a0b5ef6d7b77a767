"""Moves one block between a slot and the engine's memory, and computes its checksum.

The checksum is XXH3_64 over the engine's memory, never over the slot (law 1): a write hashes before it
copies, a read copies before it hashes. Both go piece by piece, large pieces in parts that still lie in the
CPU's cache for the second pass. ctypes.memmove and xxhash release the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from .layout import Pieces

PART_BYTES = 1 << 20
"""Copied, then hashed, at a time: fits a core's second-level cache. From this size on memmove also writes
past the cache without reading the target first; parts of half the size were measured at half the speed."""


@dataclass(frozen=True, slots=True)
class Span:
    """Slots of consecutive blocks as they are mapped here: address of the first, distance to the next."""

    address: int
    stride_bytes: int
    first_block: int
    block_count: int


def read_blocks(
    span: Span, blocks: Sequence[Pieces], checksums: Sequence[int], is_over: Callable[[], bool]
) -> tuple[int, bool]:
    """Copies a span's slots into the engine's memory, in order, until one does not match its checksum.

    Args:
        span: the slots.
        blocks, checksums: one each per slot.
        is_over: asked before each block; the copy ends when it is true.

    Returns:
        (blocks that match, whether the next one did not).
    """
    slot = span.address
    for index, (pieces, checksum) in enumerate(zip(blocks, checksums, strict=True)):
        if is_over():
            return index, False
        if read_block(slot, pieces) != checksum:
            return index, True
        slot += span.stride_bytes
    return span.block_count, False


def write_blocks(span: Span, blocks: Sequence[Pieces], is_over: Callable[[], bool]) -> list[int]:
    """Copies the engine's memory into a span's slots, in order; the checksums of the blocks copied.

    Args:
        span: the slots.
        blocks: one per slot.
        is_over: asked before each block; the copy ends when it is true.
    """
    checksums: list[int] = []
    slot = span.address
    for pieces in blocks:
        if is_over():
            break
        checksums.append(write_block(slot, pieces))
        slot += span.stride_bytes
    return checksums


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
