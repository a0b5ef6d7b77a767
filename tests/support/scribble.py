"""Damages blocks where they lie: what a bad DIMM or a wild pointer does."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefixd_client.client import Client
from prefixd_client.namespace import NamespaceSpec


def scribble(
    socket: Path, spec: NamespaceSpec, hashes: Sequence[bytes], blocks: Sequence[int], *, shard: int = 0
) -> int:
    """Flips a byte in each of these blocks of a run, through the shared memory; returns how many it hit."""
    with _slots(socket, spec, hashes, shard) as slots:
        assert slots, "nothing of the run is kept"
        for block in blocks:
            _flip(slots[block])
    return len(blocks)


def scribble_any(socket: Path, spec: NamespaceSpec, hashes: Sequence[bytes], rng: random.Random) -> None:
    """Flips a byte in one of the leading blocks that are kept at this moment, if there are any."""
    with _slots(socket, spec, hashes, 0) as slots:
        if slots:
            _flip(rng.choice(slots))


@contextmanager
def _slots(socket: Path, spec: NamespaceSpec, hashes: Sequence[bytes], shard: int) -> Iterator[list[int]]:
    """Addresses of the leading blocks of a run that are kept, and held meanwhile."""
    with Client(socket, engine_name="scribbler") as client:
        lease = client.namespace(spec).acquire(hashes, shards=(shard,), timeout_s=5.0)
        if lease is None:
            yield []
            return
        with lease:
            size = spec.kv_groups[0].block_bytes
            extents = lease._extents[shard, 0]
            yield [
                span.address + index * span.stride_bytes
                for span, _ in lease._spans(extents, 0, lease.block_count, size, lease._way((), 0))
                for index in range(span.block_count)
            ]


def _flip(slot: int) -> None:
    byte = ctypes.c_ubyte.from_address(slot + 17)
    byte.value ^= 0xFF
