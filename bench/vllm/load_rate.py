"""How fast a worker loads blocks into a paged KV cache, as a share of memcpy: at least 0.6.

    python -m bench.vllm.load_rate

64 blocks of 3 MiB (12 layers of 256 KiB), redeemed, copied and verified by the connector's own Loads, against
ctypes.memmove between a buffer and the same places. Medians of interleaved rounds.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from prefixd_client.client import Client, Namespace
from prefixd_client.connectors.vllm.jobs import LoadJob
from prefixd_client.connectors.vllm.kv_copies import HostCopies
from prefixd_client.connectors.vllm.kv_memory import KvMemory
from prefixd_client.connectors.vllm.loads import Loads
from prefixd_client.connectors.vllm.tallies import Tallies
from prefixd_client.namespace import KvGroup, NamespaceSpec

from tests.support.daemon_command import DaemonCommand

LIMIT = 0.6
ROUNDS = 15
LAYERS, BLOCKS = 12, 64
LAYER_ELEMENTS = (8, 128, 128)
"""bfloat16: 256 KiB."""


def main() -> int:
    """Prints the medians; 1 below the limit."""
    layers = {
        f"layer{index}": torch.ones(BLOCKS, *LAYER_ELEMENTS, dtype=torch.bfloat16) for index in range(LAYERS)
    }
    memory = KvMemory.of(layers, list(layers), BLOCKS)
    spec = NamespaceSpec(
        model_id="bench",
        weights_fingerprint="revision:1",
        model_config_fingerprint="00",
        kv_dtype="bfloat16",
        kv_layout="bench",
        attention_backend="none",
        block_tokens=128,
        kv_groups=(KvGroup(block_bytes=memory.block_bytes, layer_count=LAYERS),),
        hash_algorithm="vllm-sha256",
        engine_name="bench",
        layout_version="1",
    )
    hashes = [index.to_bytes(32, "big") for index in range(BLOCKS)]
    with (
        tempfile.TemporaryDirectory(prefix="pfx") as directory,
        DaemonCommand(Path(directory), dram="512MiB") as daemon,
        Client(daemon.socket) as client,
    ):
        namespace = client.namespace(spec)
        pieces = memory.pieces(range(BLOCKS))
        kept = 0
        while kept < BLOCKS:
            lease = namespace.reserve(hashes[kept:], parent_hash=hashes[kept - 1] if kept else b"")
            assert lease is not None
            with lease:
                kept += lease.store([pieces[kept + index] for index in lease.reserved_indexes]).visible
        loads = Loads(HostCopies(memory), 0, lambda _: namespace, Tallies())
        buffer = torch.ones(BLOCKS * memory.block_bytes, dtype=torch.uint8)
        rounds = [(_copy(buffer, memory), _load(loads, namespace, hashes)) for _ in range(ROUNDS)][2:]
        loads.close()
    plain, loaded = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(plain_s / loaded_s for plain_s, loaded_s in rounds)
    size = BLOCKS * memory.block_bytes
    print(
        f"memcpy {size / plain / 1e9:.1f} GB/s, load {size / loaded / 1e9:.1f} GB/s: "
        f"{ratio:.2f} of memcpy, at least {LIMIT}"
    )
    return int(ratio < LIMIT)


def _copy(buffer: torch.Tensor, memory: KvMemory) -> float:
    """Seconds for plain copies to every piece of every block."""
    begin, source = time.perf_counter(), buffer.data_ptr()
    for block in memory.pieces(range(BLOCKS)):
        for address, nbytes in block:
            ctypes.memmove(address, source, nbytes)
            source += nbytes
    return time.perf_counter() - begin


def _load(loads: Loads, namespace: Namespace, hashes: list[bytes]) -> float:
    """Seconds for one load of all blocks, redeeming included."""
    lease = namespace.acquire(hashes, shards=())
    assert lease is not None
    begin = time.perf_counter()
    loads.start(LoadJob(1, "bench", None, lease.token, 0, tuple(range(BLOCKS)), in_step=True))
    passed = time.perf_counter() - begin
    assert loads.take().counts == {1: BLOCKS}
    lease.release()
    return passed


if __name__ == "__main__":
    sys.exit(main())
