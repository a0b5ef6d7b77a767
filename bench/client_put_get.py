"""What the client costs over a plain copy: 256 blocks of 1 MiB, one process, one thread.

    python -m bench.client_put_get [--blocks N] [--block-bytes N] [--rounds N] [--json OUT]

Each round takes, interleaved: memcpy out of and into the very slots (ctypes.memmove, block by block), a get
(acquire, load with checksums, release) and a put (reserve, store with checksums, commit). Medians of
the times, and of each round's ratios memcpy / get and memcpy / put, whose limits are 0.75 and 0.65.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefixd.v1 import admin_service_pb2, admin_service_pb2_grpc
from prefixd_client import Client, ClientOptions, KvGroup, Namespace, NamespaceSpec, ReadLease, WriteLease
from prefixd_client.channel import open_channel, target_of
from prefixd_client.values import Extent

GET_LIMIT = 0.75
PUT_LIMIT = 0.65
_ADMIN: Any = admin_service_pb2_grpc.AdminServiceStub
READY_TIMEOUT_S = 30.0
OPTIONS = ClientOptions(lookup_timeout_s=5.0, write_timeout_s=5.0, open_wait_s=20.0)


def spec_of(block_bytes: int) -> NamespaceSpec:
    """A namespace for the bench."""
    return NamespaceSpec(
        model_id="bench",
        weights_fingerprint="revision:1",
        model_config_fingerprint="00",
        kv_dtype="bfloat16",
        kv_layout="bench",
        attention_backend="none",
        block_tokens=16,
        kv_groups=(KvGroup(block_bytes=block_bytes, layer_count=1),),
        hash_algorithm="sha256",
        engine_name="bench",
        layout_version="1",
    )


class Bench:
    """Engine memory, a namespace, and one run that is kept throughout."""

    def __init__(self, namespace: Namespace, block_count: int, block_bytes: int, address: str) -> None:
        self.namespace = namespace
        self.block_bytes = block_bytes
        size = block_count * block_bytes
        memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        memory[:] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self.memory = memory.reshape(block_count, block_bytes)
        """Aligned, as the allocators of engines give it."""
        self.blocks = list(self.memory)
        self.addresses = [block.ctypes.data for block in self.blocks]
        self.kept = [os.urandom(32) for _ in self.blocks]
        self._admin = _ADMIN(open_channel(target_of(address), OPTIONS))
        self.put(self.kept)
        self._held = self.leased()
        """Keeps the kept run's slots where they are."""
        self.kept_slots = self.slots(self._held, self._held._extents[0, 0])

    def put(self, hashes: list[bytes]) -> None:
        """Reserve, store, commit."""
        lease = self.namespace.reserve(hashes)
        assert lease is not None
        assert lease.store(self.blocks).visible == len(hashes), "the bench's blocks must all be stored"

    def get(self) -> None:
        """Acquire, load, release."""
        with self.leased() as lease:
            assert lease.load(self.blocks) == len(self.blocks)

    def leased(self) -> ReadLease:
        """A read lease on the kept run."""
        lease = self.namespace.acquire(self.kept)
        assert lease is not None
        assert lease.hit_count == len(self.kept), "the bench's blocks must all be kept"
        return lease

    def slots(self, lease: ReadLease | WriteLease, extents: Sequence[Extent]) -> list[int]:
        """Addresses of a lease's slots."""
        count = len(self.blocks)
        spans = lease._spans(extents, 0, count, self.block_bytes, lease._way((), 0))
        return [
            span.address + index * span.stride_bytes for span, _ in spans for index in range(span.block_count)
        ]

    def evict(self, hashes: list[bytes]) -> None:
        """Gives the slots of a run back, so that the next put takes them again."""
        ref = self.namespace._operations.session()[1]
        request = admin_service_pb2.EvictRequest(namespace=ref, block_hashes=hashes[:1])
        self._admin.Evict(request, timeout=10)

    def wait_for_writes(self) -> None:
        """Returns when nobody holds a write lease: what was aborted is free again."""
        request = admin_service_pb2.ListLeasesRequest()
        while any(
            lease.kind == admin_service_pb2.LEASE_KIND_WRITE
            for lease in self._admin.ListLeases(request).leases
        ):
            time.sleep(0.001)

    def round(self) -> dict[str, float]:
        """One time of each, seconds."""
        taken = {}
        taken["memcpy_out"] = _timed(lambda: _copy(self.addresses, self.kept_slots, self.block_bytes))
        taken["get"] = _timed(self.get)
        new = [os.urandom(32) for _ in self.blocks]
        write = self.namespace.reserve(new)
        assert write is not None
        slots = self.slots(write, write._extents)
        taken["memcpy_in"] = _timed(lambda: _copy(slots, self.addresses, self.block_bytes))
        write.abort()
        self.wait_for_writes()
        taken["put"] = _timed(lambda: self.put(new))
        self.evict(new)
        return taken


def _copy(targets: list[int], sources: list[int], block_bytes: int) -> None:
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target, source, block_bytes)


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _wait_ready(client: Client) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while client.status().state != "ready":
        if time.monotonic() > deadline:
            sys.exit(f"the daemon did not start: {client.status()}")
        time.sleep(0.02)


def measure(block_count: int, block_bytes: int, round_count: int) -> dict[str, float]:
    """Medians in seconds, and the two ratios."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory:
        socket = Path(directory) / "p.sock"
        dram = f"{max(256, 3 * block_count * block_bytes >> 20)}MiB"
        daemon = subprocess.Popen(
            [Path(sys.executable).with_name("prefixd"), "serve", "--socket", socket, "--dram-size", dram],
            stderr=subprocess.DEVNULL,
        )
        try:
            with Client(socket, engine_name="bench", options=OPTIONS) as client:
                _wait_ready(client)
                bench = Bench(client.namespace(spec_of(block_bytes)), block_count, block_bytes, str(socket))
                bench.round()
                rounds = [bench.round() for _ in range(round_count)]
        finally:
            daemon.terminate()
            daemon.wait()
    result = {name: statistics.median(taken[name] for taken in rounds) for name in rounds[0]}
    result["get_ratio"] = statistics.median(taken["memcpy_out"] / taken["get"] for taken in rounds)
    result["put_ratio"] = statistics.median(taken["memcpy_in"] / taken["put"] for taken in rounds)
    return result


def main() -> None:
    """Measure and print; exit status 1 when a ratio is below its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.blocks, arguments.block_bytes, arguments.rounds)
    size = arguments.blocks * arguments.block_bytes
    for name in ("memcpy_out", "get", "memcpy_in", "put"):
        print(f"{name:11} {1e3 * result[name]:8.1f} ms {size / result[name] / 1e9:6.1f} GB/s")
    missed = result["get_ratio"] < GET_LIMIT or result["put_ratio"] < PUT_LIMIT
    print(
        f"get {result['get_ratio']:.2f} of memcpy (limit {GET_LIMIT}), "
        f"put {result['put_ratio']:.2f} (limit {PUT_LIMIT}) {'MISSED' if missed else 'ok'}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    sys.exit(missed)


if __name__ == "__main__":
    main()
