"""Moves one block between a slot and the engine's memory, and computes its checksum.

The checksum is XXH3_64 over the engine's memory, never over the slot (law 1). Each part is copied and then
hashed, while it still lies in the CPU's cache: a copy waits for memory less than a hash does, since it reads
and writes at a time. Memory that changes between the two is a mismatch. ctypes.memmove and xxhash release the
GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from .layout import Pieces

PART_BYTES = 256 << 10
"""Copied, then hashed, at a time where slot and memory lie alike: a quarter of a second-level cache."""
UNALIKE_PART_BYTES = 1 << 20
"""The same where they do not: below this size memmove uses the processor's string copy, which runs at half
the speed when source and target differ in their place within a cache line."""
LINE_BYTES = 64


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
def _parts(nbytes: int, alike: bool) -> tuple[tuple[int, int, type[ctypes.Array[ctypes.c_char]]], ...]:
    """(offset, bytes, ctypes array type) of what is copied and hashed at a time of a piece of this size.

    Kept, since making an array type costs more than hashing a small piece.
    """
    part_bytes = PART_BYTES if alike else UNALIKE_PART_BYTES
    starts = range(0, max(1, nbytes - part_bytes + 1), part_bytes)
    ends = [*starts[1:], nbytes]
    return tuple(
        (start, end - start, ctypes.c_char * (end - start)) for start, end in zip(starts, ends, strict=True)
    )


def read_block(slot: int, pieces: Pieces) -> int:
    """Copies a slot into the engine's memory; returns the checksum of what arrived there.

    Args:
        slot: address of the slot; it must hold as many bytes as the pieces.
        pieces: the engine's memory.
    """
    digest = xxhash.xxh3_64()
    for start, nbytes in pieces:
        for offset, size, memory in _parts(nbytes, (slot ^ start) % LINE_BYTES == 0):
            target = start + offset
            memmove(target, slot + offset, size)
            digest.update(memory.from_address(target))
        slot += nbytes
    return int(digest.intdigest())


def write_block(slot: int, pieces: Pieces) -> int:
    """Copies the engine's memory into a slot; returns the checksum of the engine's memory."""
    digest = xxhash.xxh3_64()
    for start, nbytes in pieces:
        for offset, size, memory in _parts(nbytes, (slot ^ start) % LINE_BYTES == 0):
            source = start + offset
            memmove(slot + offset, source, size)
            digest.update(memory.from_address(source))
        slot += nbytes
    return int(digest.intdigest())


def checksum_of(data: bytes | bytearray | memoryview) -> int:
    """XXH3_64, seed 0, of contiguous bytes."""
    return int(xxhash.xxh3_64_intdigest(data))
