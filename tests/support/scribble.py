"""Damages blocks where they lie: what a bad DIMM or a wild pointer does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from prefixd_client.client import Client
from prefixd_client.namespace import NamespaceSpec


def scribble(
    socket: Path, spec: NamespaceSpec, hashes: Sequence[bytes], blocks: Sequence[int], *, shard: int = 0
) -> int:
    """Flips a byte in each of these blocks of a run, through the shared memory; returns how many it hit."""
    hit = 0
    with Client(socket, engine_name="scribbler") as client:
        lease = client.namespace(spec).acquire(hashes, shards=(shard,), timeout_s=5.0)
        assert lease is not None, "nothing of the run is kept"
        with lease:
            size = spec.kv_groups[0].block_bytes
            extents = lease._extents[shard, 0]
            slots = [
                span.address + index * span.stride_bytes
                for span, _ in lease._spans(extents, 0, lease.block_count, size, lease._way((), 0))
                for index in range(span.block_count)
            ]
            for block in blocks:
                byte = ctypes.c_ubyte.from_address(slots[block] + 17)
                byte.value ^= 0xFF
                hit += 1
    return hit
