"""How soon a daemon serves, and has its NVMe tier back, after a start with a million indexed blocks.

    python -m bench.recovery [--directory DIR] [--records N] [--json OUT]

The store is built once in DIR and used again. `prefixd serve` is started on it
three times; the times from its start to SERVING and to the tier's `ready`
are judged by their medians: 4 s a million. Meanwhile DRAM serves: lookups of a
run in DRAM are timed during recovery and after it. A fourth recovery, on this
process's loop, shows how late the loop comes to what is due; one step of recovery
is a millisecond of work, the rest is the kernel's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prefixd.v1 import admin_service_pb2, admin_service_pb2_grpc, cache_service_pb2_grpc, types_pb2
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.base.clock import SystemClock
from prefixd_server.base.config_sources import load_config
from prefixd_server.base.types import (
    BlockEncoding,
    ChecksumAlgorithm,
    KvGroup,
    KvGroupKind,
    NamespaceSpec,
    Tier,
)
from prefixd_server.cache.build import build_cache
from prefixd_server.cache.nvme_health import NvmeState
from prefixd_server.index.process import Index
from prefixd_server.index.records import NamespaceRecord, Records, new_records, seal
from prefixd_server.media.movers import Movers
from prefixd_server.media.nvme import NvmeMedium

from bench.lookup_rpc import READY_TIMEOUT_S, chain, connected, fill, wait_until_serving

LIMIT_S_PER_MILLION = 4.0
ROUNDS = 3
SLOT_BYTES = 4096
SEGMENT_BYTES = 256 << 20
CHAIN_BLOCKS = 64
"""A thousand tokens; every other chain branches off another one in its middle, as conversations do."""
GROUP_RECORDS = 8192
LOOKUP_BLOCKS = 64
LOOKUP_PAUSE_S = 0.01
"""Between lookups: an engine that asks, not one that takes the processor away from recovery."""
PROBE_S = 0.001


def spec() -> NamespaceSpec:
    """Of the blocks in the store."""
    return NamespaceSpec(
        model_id="recovery",
        weights_fingerprint="revision:bench",
        model_config_fingerprint="bench",
        tokenizer_fingerprint="",
        kv_dtype="uint8",
        kv_scales_fingerprint="",
        kv_layout="bench",
        attention_backend="none",
        cpu_isa_class="",
        adapter_fingerprint="",
        block_tokens=16,
        kv_groups=(KvGroup(KvGroupKind.FULL_ATTENTION, SLOT_BYTES, 1),),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        shard_count=1,
        hash_algorithm="sha256",
        hash_seed="",
        hash_bytes=32,
        engine_name="bench",
        layout_version="1",
        checksum_algorithm=ChecksumAlgorithm.XXH3_64,
        encoding=BlockEncoding.RAW,
    )


def settings(count: int) -> dict[str, str]:
    """Configuration of a daemon over `count` blocks."""
    segments = -(-count * SLOT_BYTES // SEGMENT_BYTES)
    size = (segments + 1) * (SEGMENT_BYTES + SLOT_BYTES) * 32 // 31 + (16 << 20)
    return {
        "dram.size": "64MiB",
        "dram.segment": "8MiB",
        "nvme.size": f"{-(-size >> 20)}MiB",
        "nvme.segment": f"{SEGMENT_BYTES >> 20}MiB",
    }


def records_of(medium: NvmeMedium, space: bytes, count: int) -> Records:
    """Sealed records of `count` blocks in chains, in the order in which a daemon would write them."""
    rng = np.random.default_rng(1)
    hashes = rng.integers(1, 2**63, (count, 4), dtype=np.uint64)
    place = np.arange(count)
    at, number = place % CHAIN_BLOCKS, place // CHAIN_BLOCKS
    branches = (number % 2 == 1) & (at == 0)
    parent = place - 1
    parent[branches] = (number[branches] - 1) * CHAIN_BLOCKS + CHAIN_BLOCKS // 2
    parent[(number % 2 == 0) & (at == 0)] = -1
    depth = np.where(number % 2 == 1, at + CHAIN_BLOCKS // 2 + 1, at)
    records = new_records(space, hashes, medium.store_uuid)
    slots = SEGMENT_BYTES // SLOT_BYTES
    records["block_bytes"] = SLOT_BYTES
    records["segment"], records["slot"] = place // slots, place % slots
    records["generation"] = medium.generations[place // slots]
    records["depth"] = depth
    records["parent"] = np.where((parent >= 0)[:, None], hashes[parent], 0)
    records["last_use"] = 1_700_000_000.0 + place / 1000
    seal(records)
    return records


async def build(directory: Path, count: int) -> None:
    """Makes the store; bytes of blocks are not written, for none is read."""
    segments = -(-count * SLOT_BYTES // SEGMENT_BYTES)
    medium = NvmeMedium([directory], segments, SEGMENT_BYTES)
    for segment in range(segments):
        medium.raise_generation(segment, SLOT_BYTES)
    index = Index(medium.index_directory, medium.store_uuid)
    await index.start()
    owner = NamespaceRecord("default", spec().fingerprint(), 1, spec(), 1_700_000_000.0)
    (space,) = owner.spaces()
    records = records_of(medium, space, count)
    await index.commit(namespaces=[owner])
    for start in range(0, count, GROUP_RECORDS):
        await index.commit(puts=records[start : start + GROUP_RECORDS])
    await index.close()
    medium.close()


@contextmanager
def daemon(socket: Path, data_dir: Path, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon on the store; killed at the end."""
    words = [word for name, value in settings(count).items() for word in ("--set", f"{name}={value}")]
    command = [str(Path(sys.executable).with_name("prefixd")), "serve", "--socket", str(socket)]
    with (data_dir / "daemon.log").open("ab") as log:
        running = subprocess.Popen([*command, "--data-dir", str(data_dir), *words], stdout=log, stderr=log)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def nvme_tier(admin: Any) -> Any:
    """What GetStats says about the tier."""
    tiers = admin.GetStats(admin_service_pb2.GetStatsRequest(), timeout=10).tiers
    return next(tier for tier in tiers if tier.tier == types_pb2.TIER_NVME)


def latencies(stub: Any, request: wire.LookupRequest, until: float) -> list[float]:
    """Seconds of lookups, one after the other, until then."""
    found = []
    while (before := time.perf_counter()) < until:
        answer = stub.Lookup(request, timeout=10)
        found.append(time.perf_counter() - before)
        time.sleep(LOOKUP_PAUSE_S)
        assert answer.hits[0].block_count == LOOKUP_BLOCKS
    return found


def one_start(data_dir: Path, count: int) -> dict[str, float]:
    """One start of a daemon, timed."""
    socket = data_dir / "p.sock"
    began = time.perf_counter()
    with daemon(socket, data_dir, count) as running, connected(socket) as channel:
        wait_until_serving(channel)
        serving = time.perf_counter() - began
        make: Any = admin_service_pb2_grpc.AdminServiceStub
        admin = make(channel)
        make = cache_service_pb2_grpc.CacheServiceStub
        stub = make(channel)
        hashes = chain(LOOKUP_BLOCKS)
        request = wire.LookupRequest(namespace=fill(stub, hashes), block_hashes=hashes)
        during: list[float] = []
        while nvme_tier(admin).state != "ready":
            during += latencies(stub, request, time.perf_counter() + 0.05)
            if time.perf_counter() - began > READY_TIMEOUT_S * 4:
                raise TimeoutError("the NVMe tier is not ready")
        ready = time.perf_counter() - began
        cpu = processor_s(running.pid)
        after = latencies(stub, request, time.perf_counter() + 1.0)
        kept = nvme_tier(admin).resident_slot_count
        assert kept >= count, f"{kept} blocks of {count} came back"
    return {
        "serving_s": serving,
        "ready_s": ready,
        "ready_cpu_s": cpu,
        "lookups_during": len(during),
        "during_p50_ms": 1e3 * statistics.median(during or [0.0]),
        "during_p99_ms": 1e3 * percentile(during, 0.99),
        "during_max_ms": 1e3 * max(during, default=0.0),
        "after_p50_ms": 1e3 * statistics.median(after),
        "after_p99_ms": 1e3 * percentile(after, 0.99),
    }


def processor_s(pid: int) -> float:
    """Processor time of a process and its index process: what other load does not lengthen."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    ticks = 0
    for each in pids:
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    """The value below which that share lies; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def steps(data_dir: Path, count: int) -> list[float]:
    """Seconds by which the loop comes late, every millisecond while it recovers."""
    config = load_config(flags=settings(count) | {"data_dir": str(data_dir)})
    clock = SystemClock()
    cache = build_cache(config, clock, Movers(2, 256))
    cache.start()
    storage = cache.storage
    assert storage is not None
    found = []
    while storage.nvme.health.state is not NvmeState.READY:
        due = time.perf_counter() + PROBE_S
        await asyncio.sleep(PROBE_S)
        found.append(max(0.0, time.perf_counter() - due))
    assert cache.state.catalog.slots[Tier.NVME].counts().resident == count
    await cache.stop()
    return found


def main() -> None:
    """Builds what is missing, measures, prints, exits with 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("build/bench-recovery"))
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    data_dir = (options.directory / str(options.records)).absolute()
    built = data_dir / "built"
    if not built.exists():
        data_dir.mkdir(parents=True)
        print(f"building a store of {options.records:,} records in {data_dir}", flush=True)
        asyncio.run(build(data_dir / "nvme", options.records))
        built.touch()
    limit = LIMIT_S_PER_MILLION * options.records / 1e6
    starts = [one_start(data_dir, options.records) for _ in range(ROUNDS)]
    result: dict[str, float] = {
        name: statistics.median(start[name] for start in starts) for name in starts[0]
    }
    held = asyncio.run(steps(data_dir, options.records))
    result |= {
        "loop_late_p50_ms": 1e3 * statistics.median(held),
        "loop_late_p99_ms": 1e3 * percentile(held, 0.99),
        "loop_late_max_ms": 1e3 * max(held),
        "load_1min": os.getloadavg()[0],
    }
    print("\n".join(f"{name:16} {value:10.2f}" for name, value in result.items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    fine = max(result["serving_s"], result["ready_s"]) <= limit
    print(f"limit {limit:g} s: " + ("held" if fine else "MISSED"))
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
