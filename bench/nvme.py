"""The NVMe tier beside raw direct I/O, and how fast its index comes back.

    python -m bench.nvme [--directory DIR] [--rounds N] [--records N] [--json OUT]

Runs of 64 blocks of 64 KiB, 1 MiB and 4 MiB. Raw: preadv and pwritev with
O_DIRECT on the same preallocated files, in the same pieces of at most 8 MiB, by
as many threads as there are movers, and fdatasync after the same 64 MiB.
Demotion: checksums over the source, writes, flush, index records, durable.
Promotion: reads, checksums over the target. Raw and ours take turns; the medians
of each round's ratios are judged: promotion >= 0.80, demotion >= 0.75 of raw.
Recovery: index start, load and chains of --records records, within 4 s a million.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from prefixd_server.base.types import ChecksumAlgorithm, Tier
from prefixd_server.index.chains import chains_of
from prefixd_server.index.process import Index, IndexOptions
from prefixd_server.index.records import Records, new_records, seal, space_identity
from prefixd_server.media.aligned import aligned_buffer
from prefixd_server.media.movers import CallJob, CopyJob, Movers
from prefixd_server.media.nvme import NvmeMedium
from prefixd_server.media.nvme_files import open_direct
from prefixd_server.media.nvme_format import HEADER_BYTES

MIB = 1 << 20
SEGMENT_BYTES = 256 * MIB
SEGMENT_COUNT = 2
RUN_BLOCKS = 64
BLOCK_BYTES = (64 * 1024, MIB, 4 * MIB)
PIECE_BYTES = 8 * MIB
BATCH_BYTES = 64 * MIB
ROUND_BYTES = 256 * MIB
BATCHES_UNDER_WAY = 3
MOVER_COUNT = 2
PROMOTION_LIMIT = 0.80
DEMOTION_LIMIT = 0.75
RECOVERY_LIMIT_S_PER_MILLION = 4.0
SPACE = space_identity("bench", bytes(32), 1, 0, 0)


class Memory:
    """A medium of plain aligned memory: what DRAM is to the movers."""

    tier = Tier.DRAM

    def __init__(self, length: int) -> None:
        self.bytes = aligned_buffer(length)
        self.segment_bytes = length
        self.bytes[:] = np.random.default_rng(0).integers(0, 2**64, length // 8, dtype=np.uint64).tobytes()

    def read(self, segment_index: int, offset_bytes: int, target: memoryview) -> None:
        """See Medium."""
        target[:] = self.view(segment_index, offset_bytes, len(target))

    def write(self, segment_index: int, offset_bytes: int, source: memoryview) -> None:
        """See Medium."""
        self.view(segment_index, offset_bytes, len(source))[:] = source

    def view(self, segment_index: int, offset_bytes: int, length_bytes: int) -> memoryview:
        """See Medium."""
        assert segment_index == 0
        return self.bytes[offset_bytes : offset_bytes + length_bytes]


@dataclass(frozen=True)
class Piece:
    """Bytes of one I/O; the place in memory is the place within the round."""

    memory_offset: int
    segment: int
    offset: int
    length: int


def batches(block_bytes: int) -> list[list[Piece]]:
    """The pieces of one round, by what is made durable together."""
    run_bytes = RUN_BLOCKS * block_bytes
    batch_bytes = max(run_bytes, BATCH_BYTES)
    piece_bytes = min(run_bytes, max(block_bytes, PIECE_BYTES))
    return [
        [
            Piece(at, at // SEGMENT_BYTES, at % SEGMENT_BYTES, piece_bytes)
            for at in range(start, start + batch_bytes, piece_bytes)
        ]
        for start in range(0, ROUND_BYTES, batch_bytes)
    ]


class Bench:
    """One medium, one index, memory, and raw descriptors of the same files."""

    def __init__(self, medium: NvmeMedium, index: Index, movers: Movers) -> None:
        self.medium = medium
        self.index = index
        self.movers = movers
        self.memory = Memory(ROUND_BYTES)
        self.again = Memory(ROUND_BYTES)
        self.pool = ThreadPoolExecutor(MOVER_COUNT)
        paths = [medium.index_directory.parent / f"segment-{n:06d}.kv" for n in range(SEGMENT_COUNT)]
        self.raw = [open_direct(medium._files, path, os.O_RDWR)[0] for path in paths]
        self.hashes = 0

    # -- raw -----------------------------------------------------------------------------------

    async def raw_write(self, block_bytes: int) -> None:
        """Pieces, then one sync a batch."""
        for batch in batches(block_bytes):
            await self._raw(os.pwritev, self.memory, batch)
            for segment in {piece.segment for piece in batch}:
                await asyncio.get_running_loop().run_in_executor(self.pool, os.fdatasync, self.raw[segment])

    async def raw_read(self, block_bytes: int) -> None:
        """Pieces."""
        for batch in batches(block_bytes):
            await self._raw(os.preadv, self.again, batch)

    async def _raw(self, call: Callable[..., int], memory: Memory, batch: list[Piece]) -> None:
        loop = asyncio.get_running_loop()

        def one(piece: Piece) -> None:
            view = memory.view(0, piece.memory_offset, piece.length)
            assert call(self.raw[piece.segment], [view], HEADER_BYTES + piece.offset) == piece.length

        await asyncio.gather(*(loop.run_in_executor(self.pool, one, piece) for piece in batch))

    # -- ours ----------------------------------------------------------------------------------

    async def demote(self, block_bytes: int, checksums: np.ndarray) -> None:
        """Bytes, flush, index records: durable. One batch writes while the one before is recorded."""
        under_way = asyncio.Semaphore(BATCHES_UNDER_WAY)

        async def one(batch: list[Piece]) -> None:
            async with under_way:
                jobs = (self._job(piece, block_bytes, checksums, down=True) for piece in batch)
                await asyncio.gather(*map(self.movers.run, jobs))
                segments = {piece.segment for piece in batch}
                await self.movers.run(CallJob(partial(self.medium.flush, segments)))
                await self.index.commit(puts=self._records(batch, block_bytes, checksums))

        await asyncio.gather(*map(one, batches(block_bytes)))

    async def promote(self, block_bytes: int, checksums: np.ndarray) -> None:
        """Bytes, verified."""
        for batch in batches(block_bytes):
            jobs = (self._job(piece, block_bytes, checksums, down=False) for piece in batch)
            results = await asyncio.gather(*map(self.movers.run, jobs))
            assert not any(result.bad.any() for result in results)

    def _job(self, piece: Piece, block_bytes: int, checksums: np.ndarray, *, down: bool) -> CopyJob:
        first = piece.memory_offset // block_bytes
        dram = (self.memory if down else self.again, 0, piece.memory_offset)
        nvme = (self.medium, piece.segment, piece.offset)
        return CopyJob(
            *(dram if down else nvme),
            *(nvme if down else dram),
            stride_bytes=block_bytes,
            block_bytes=block_bytes,
            checksums=checksums[first : first + piece.length // block_bytes],
            algorithm=ChecksumAlgorithm.XXH3_64,
        )

    def _records(self, batch: list[Piece], block_bytes: int, checksums: np.ndarray) -> Records:
        first = batch[0].memory_offset // block_bytes
        count = sum(piece.length for piece in batch) // block_bytes
        hashes = np.arange(self.hashes, self.hashes + 4 * count, dtype=np.uint64).reshape(count, 4)
        self.hashes += 4 * count
        records = new_records(SPACE, hashes, self.medium.store_uuid)
        records["checksum"] = checksums[first : first + count]
        seal(records)
        return records

    def close(self) -> None:
        """Lets go of everything."""
        for fd in self.raw:
            os.close(fd)
        self.pool.shutdown()


async def timed(work: Awaitable[object]) -> float:
    """Seconds that it takes."""
    before = time.perf_counter()
    await work
    return time.perf_counter() - before


async def transfers(bench: Bench, rounds: int) -> list[dict[str, object]]:
    """One row per block size and direction."""
    rows: list[dict[str, object]] = []
    for block_bytes in BLOCK_BYTES:
        view = bench.memory.bytes
        sums = [
            xxhash.xxh3_64_intdigest(view[at : at + block_bytes]) for at in range(0, ROUND_BYTES, block_bytes)
        ]
        checksums = np.array(sums, dtype=np.uint64)
        kinds = {
            "demotion": (bench.raw_write, partial(bench.demote, checksums=checksums), DEMOTION_LIMIT),
            "promotion": (bench.raw_read, partial(bench.promote, checksums=checksums), PROMOTION_LIMIT),
        }
        for name, (raw, ours, limit) in kinds.items():
            await raw(block_bytes)
            await ours(block_bytes)
            pairs = []
            for number in range(rounds):
                first, second = (raw, ours) if number % 2 else (ours, raw)
                times = {first: await timed(first(block_bytes)), second: await timed(second(block_bytes))}
                pairs.append((times[raw], times[ours]))
            rows.append(
                {
                    "what": name,
                    "block_kib": block_bytes // 1024,
                    "raw_gb_s": ROUND_BYTES / statistics.median(raw_s for raw_s, _ in pairs) / 1e9,
                    "ours_gb_s": ROUND_BYTES / statistics.median(ours_s for _, ours_s in pairs) / 1e9,
                    "ratio": statistics.median(raw_s / ours_s for raw_s, ours_s in pairs),
                    "limit": limit,
                }
            )
            print("{what:10} {block_kib:6} KiB  raw {raw_gb_s:5.2f} GB/s  ours {ours_gb_s:5.2f} GB/s  "
                  "ratio {ratio:4.2f} (limit {limit})".format(**rows[-1]), flush=True)  # fmt: skip
    return rows


async def recovery(directory: Path, count: int) -> dict[str, object]:
    """Seconds from nothing to chains of `count` records in runs of 200; the median of three."""
    uuid = bytes(16)
    index = Index(directory / "recovery", uuid, IndexOptions())
    await index.start()
    rng = np.random.default_rng(1)
    for start in range(0, count, 10_000):
        hashes = rng.integers(0, 2**63, (min(10_000, count - start), 4), dtype=np.uint64)
        records = new_records(SPACE, hashes, uuid)
        records["depth"] = np.arange(len(records)) % 200
        records["parent"][1:] = hashes[:-1]
        records["parent"][::200] = 0
        seal(records)
        await index.commit(puts=records)
    await index.close()
    found = []
    for _ in range(3):
        before = time.perf_counter()
        index = Index(directory / "recovery", uuid, IndexOptions())
        await index.start()
        started = time.perf_counter()
        loaded = [batch async for batch in index.load()]
        done = time.perf_counter()
        ordered = chains_of(np.concatenate(loaded), rng)
        end = time.perf_counter()
        assert len(ordered.order) == count
        found.append((started - before, done - started, end - done))
        await index.close()
    start_s, load_s, chains_s = (statistics.median(times) for times in zip(*found, strict=True))
    limit = RECOVERY_LIMIT_S_PER_MILLION * count / 1e6
    total = start_s + load_s + chains_s
    print(
        f"recovery of {count:,} records: start {start_s:.2f} s, load {load_s:.2f} s, "
        f"chains {chains_s:.2f} s; {total:.2f} s (limit {limit:.2f} s)"
    )
    return {"records": count, "start_s": start_s, "load_s": load_s, "chains_s": chains_s, "limit_s": limit}


async def run(directory: Path, rounds: int, records: int) -> dict[str, object]:
    """Everything."""
    medium = NvmeMedium([directory / "store"], SEGMENT_COUNT, SEGMENT_BYTES)
    index = Index(medium.index_directory, medium.store_uuid)
    await index.start()
    movers = Movers(MOVER_COUNT, 256)
    bench = Bench(medium, index, movers)
    try:
        rows = await transfers(bench, rounds)
        recovered = await recovery(directory, records)
    finally:
        bench.close()
        movers.close()
        await index.close()
        medium.close()
    return {"transfers": rows, "recovery": recovered, "direct": medium.report.direct}


def main() -> None:
    """Runs everything; prints a table; exits with 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("build"), help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-nvme-") as scratch:
        results = asyncio.run(run(Path(scratch), options.rounds, options.records))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    rows, recovered = results["transfers"], results["recovery"]
    held = all(row["ratio"] >= row["limit"] for row in rows)
    held &= sum(recovered[name] for name in ("start_s", "load_s", "chains_s")) <= recovered["limit_s"]
    print("limits held" if held else "LIMITS MISSED")
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
