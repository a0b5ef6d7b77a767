"""The event loop while the NVMe disk fails, beside the same loop while it is well.

    python -m bench.nvme_faults [--directory DIR] [--rounds N] [--seconds S] [--json OUT]

One cache floor in this process, with a small DRAM tier over real files: puts, reads
of what is in DRAM and reads of what has fallen out of it, at a fixed pace. A timer
of 1 ms tells how late the loop runs it. Each round measures the disk well, hanging
(every read, write and sync), failing (EIO), and without its index (killed again and
again); the median over the rounds of p99 over p99-when-well is judged: <= 1.5. Also
judged: what is in DRAM is always served.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hashlib
import json
import os
import signal
import statistics
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import uvloop
import xxhash
from prefixd_server.base.clock import SystemClock
from prefixd_server.base.config import Config, DramConfig, NvmeConfig, ServerConfig
from prefixd_server.base.files import RealFiles
from prefixd_server.base.types import (
    BlockEncoding,
    ChecksumAlgorithm,
    Hashes,
    KvGroup,
    KvGroupKind,
    LeaseRelease,
    NamespaceSpec,
)
from prefixd_server.cache.build import DiskSeams, build_cache
from prefixd_server.index.process import IndexOptions
from prefixd_server.media.movers import Movers

MIB = 1 << 20
BLOCK_BYTES = 65_536
RUN = 8
TICK_S = 0.001
PACE_S = 0.005
LIMIT = 1.5
FAULTS = ("hanging", "failing", "without index")


class Disk(RealFiles):
    """The real files, with a switch."""

    def __init__(self) -> None:
        self.mode = "well"
        self._go_on = threading.Event()

    def turn(self, mode: str) -> None:
        """How the disk is from now on."""
        self.mode = mode
        if mode == "hanging":
            self._go_on.clear()
        else:
            self._go_on.set()

    def read_at(self, fd: int, target: memoryview, offset: int) -> int:
        """See Files."""
        self._step()
        return super().read_at(fd, target, offset)

    def write_at(self, fd: int, source: memoryview, offset: int) -> int:
        """See Files."""
        self._step()
        return super().write_at(fd, source, offset)

    def sync_data(self, fd: int) -> None:
        """See Files."""
        self._step()
        super().sync_data(fd)

    def _step(self) -> None:
        if self.mode == "hanging":
            self._go_on.wait()
        if self.mode == "failing":
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def spec() -> NamespaceSpec:
    """The one namespace."""
    texts = (
        *("model_id", "weights_fingerprint", "model_config_fingerprint", "tokenizer_fingerprint"),
        *("kv_dtype", "kv_scales_fingerprint", "kv_layout", "attention_backend", "cpu_isa_class"),
        *("adapter_fingerprint", "hash_algorithm", "hash_seed", "engine_name", "layout_version"),
    )
    return NamespaceSpec(
        **dict.fromkeys(texts, "bench"),
        block_tokens=16,
        kv_groups=(KvGroup(KvGroupKind.FULL_ATTENTION, BLOCK_BYTES, 2),),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        shard_count=1,
        hash_bytes=32,
        checksum_algorithm=ChecksumAlgorithm.XXH3_64,
        encoding=BlockEncoding.RAW,
    )


class Load:
    """Engines at a fixed pace: a new run, a run of DRAM, a run that has fallen out of it."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        config = Config(
            dram=DramConfig(size_bytes=64 * MIB, segment_bytes=2 * MIB),
            nvme=NvmeConfig(
                size_bytes=512 * MIB, segment_bytes=16 * MIB, retry_pause_s=0.2, latency_max_s=0.3
            ),
            server=ServerConfig(data_dir=directory),
        )
        seams = DiskSeams(files=disk, index_options=IndexOptions(restart_pause_min_s=0.05))
        self.cache = build_cache(config, SystemClock(), Movers(2, 256), 1, seams)
        self.cache.start()
        self.ref = self.cache.open_namespace("default", spec())
        session = self.cache.sessions.open("default", "one", "bench", "0", 0, True)
        self.session = session.session_id
        self.cache.companions.attach(self.session, "default", os.getpid(), 0)
        self.sums = np.full(RUN, xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES)), dtype=np.uint64)
        self.zeros = bytes(BLOCK_BYTES)
        self.number = 0
        self.unserved = 0
        """Runs of DRAM that were not served whole."""

    @property
    def health(self) -> object:
        """The tier's state."""
        assert self.cache.storage is not None
        return self.cache.storage.nvme.health.state.value

    def run_of(self, number: int) -> Hashes:
        """The hashes of a run."""
        rows = [hashlib.sha256(b"%d/%d" % (number, block)).digest() for block in range(RUN)]
        return np.frombuffer(b"".join(rows), dtype=np.uint64).reshape(RUN, 4)

    def put(self) -> None:
        """Stores one more run of zeros."""
        ids = ("default", self.session, self.ref, 0, 0)
        reserved = self.cache.reserve(*ids, None, self.run_of(self.number), None)
        if reserved.lease is not None:
            for extent in reserved.extents:
                segment = self.cache.room.segment_ids.index(extent.segment_id)
                view = self.cache.state.dram.view(
                    segment, extent.offset_bytes, extent.block_count * extent.stride_bytes
                )
                assert view is not None
                view[:] = self.zeros * extent.block_count
            self.cache.commit("default", self.session, reserved.lease.token, 0, self.sums)
        self.number += 1

    async def read(self, number: int, max_wait_s: float) -> int:
        """Blocks of a run that are leased."""
        hashes = self.run_of(number)
        if max_wait_s:
            await self.cache.wait_for("default", self.ref, hashes, max_wait_s)
        answer = self.cache.acquire("default", self.session, self.ref, hashes, 0, (0,), None)
        if answer.lease is not None:
            await self.cache.release("default", self.session, [LeaseRelease(answer.lease.token)])
        return answer.run.hit_count

    async def go_on(self) -> None:
        """Works until cancelled; what has fallen out of DRAM is asked for without waiting for the answer."""
        cold: set[asyncio.Task[int]] = set()
        while True:
            self.put()
            self.unserved += await self.read(self.number - 1, 0.0) < RUN
            if self.number > 400 and len(cold) < 8:
                task = asyncio.ensure_future(self.read(self.number - 300, 0.05))
                cold.add(task)
                task.add_done_callback(cold.discard)
            await asyncio.sleep(PACE_S)


async def lateness(seconds: float, each: Callable[[], None]) -> float:
    """p99 of how late a timer of TICK_S is run, in seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    late = []
    while loop.time() < end:
        due = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        late.append(max(0.0, loop.time() - due))
        each()
    return float(np.percentile(late, 99))


async def rounds_of(load: Load, disk: Disk, rounds: int, seconds: float) -> dict[str, list[float]]:
    """p99 in seconds, by how the disk is, one per round."""
    found: dict[str, list[float]] = {mode: [] for mode in ("well", *FAULTS)}
    storage = load.cache.storage
    assert storage is not None

    def kill_index() -> None:
        pid = storage.nvme.index.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    for _ in range(rounds):
        for mode in ("well", *FAULTS):
            disk.turn("well" if mode == "without index" else mode)
            await asyncio.sleep(0.5)
            each = kill_index if mode == "without index" else (lambda: None)
            found[mode].append(await lateness(seconds, each))
            disk.turn("well")
            while load.health != "ready":
                await asyncio.sleep(0.05)
    return found


async def run(directory: Path, rounds: int, seconds: float) -> dict[str, object]:
    """Everything."""
    disk = Disk()
    load = Load(directory, disk)
    while load.health != "ready":
        await asyncio.sleep(0.01)
    working = asyncio.ensure_future(load.go_on())
    await asyncio.sleep(3.0)
    found = await rounds_of(load, disk, rounds, seconds)
    working.cancel()
    problems = load.cache.check()
    await load.cache.stop()
    rows = []
    for mode in FAULTS:
        ratio = statistics.median(f / w for f, w in zip(found[mode], found["well"], strict=True))
        p99_ms = 1000 * statistics.median(found[mode])
        well_ms = 1000 * statistics.median(found["well"])
        rows.append({"disk": mode, "p99_ms": p99_ms, "well_p99_ms": well_ms, "ratio": ratio, "limit": LIMIT})
        print(
            f"disk {mode:14} loop p99 {p99_ms:6.2f} ms, well {well_ms:6.2f} ms: {ratio:.2f} (limit {LIMIT})"
        )
    print(f"runs of DRAM not served whole: {load.unserved} of {load.number} (limit 0)")
    return {"rows": rows, "unserved": load.unserved, "problems": problems}


def main() -> None:
    """Runs everything; exits with 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("build"), help="on the disk to be used")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-nvme-faults-") as scratch:
        results = uvloop.run(run(Path(scratch), options.rounds, options.seconds))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    held = results["problems"] == [] and results["unserved"] == 0
    held &= all(row["ratio"] <= row["limit"] for row in results["rows"])
    print("limits held" if held else "LIMITS MISSED")
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
