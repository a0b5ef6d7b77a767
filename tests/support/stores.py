"""Index records, and a small NVMe store on disk, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from prefixd_server.base.files import Files
from prefixd_server.base.types import Hashes
from prefixd_server.index.records import Records, new_records, seal, space_identity
from prefixd_server.media.aligned import aligned_buffer
from prefixd_server.media.nvme import NvmeMedium

UUID = bytes(range(16))
FINGERPRINT = b"f" * 32
SEGMENT_BYTES = 1 << 20
SLOT_BYTES = 65_536
SPACE = space_identity("red", FINGERPRINT, 1, 0, 0)


def hashes(count: int, seed: int = 0) -> Hashes:
    """Random prefix hashes."""
    return np.random.default_rng(seed).integers(0, 2**63, size=(count, 4), dtype=np.uint64)


def run_records(count: int, seed: int = 0, space: bytes = SPACE, uuid: bytes = UUID) -> Records:
    """Sealed records of one run of `count` blocks, parents first, in segment 0."""
    run = hashes(count, seed)
    records = new_records(space, run, uuid)
    records["block_bytes"] = SLOT_BYTES
    records["slot"] = np.arange(count)
    records["depth"] = np.arange(count)
    records["parent"][1:] = run[:-1]
    seal(records)
    return records


def small_store(directory: Path, segment_count: int = 2, files: Files | None = None) -> NvmeMedium:
    """A medium of small segments in one directory."""
    return NvmeMedium([directory], segment_count, SEGMENT_BYTES, files)


def blocks(count: int, seed: int = 0) -> tuple[memoryview, list[int]]:
    """An aligned extent of random blocks, and their checksums."""
    extent = aligned_buffer(count * SLOT_BYTES)
    extent[:] = np.random.default_rng(seed).bytes(count * SLOT_BYTES)
    starts = range(0, count * SLOT_BYTES, SLOT_BYTES)
    return extent, [xxhash.xxh3_64_intdigest(extent[at : at + SLOT_BYTES]) for at in starts]


def store_run(medium: NvmeMedium, count: int, *, segment: int = 0, seed: int = 0) -> Records:
    """Writes a run of blocks at a segment's start, durably; its records, sealed and not committed."""
    medium.raise_generation(segment, SLOT_BYTES)
    extent, sums = blocks(count, seed)
    medium.write(segment, 0, extent)
    medium.flush([segment])
    records = run_records(count, seed, uuid=medium.store_uuid)
    records["segment"] = segment
    records["generation"] = medium.generation(segment)
    records["checksum"] = sums
    seal(records)
    return records
