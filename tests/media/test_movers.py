"""Movers: results and failures reach who waits; bounds hold; cancelling never stops a copy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash
from prefixd_server.base.errors import LimitReached, Unavailable
from prefixd_server.base.types import ChecksumAlgorithm, Tier
from prefixd_server.media.checksum import checksum, checksums
from prefixd_server.media.dram import DramMedium
from prefixd_server.media.medium import Medium
from prefixd_server.media.movers import CallJob, CopyJob, FillJob, Movers, RenewJob, VerifyJob

from tests.support.cranked_movers import CrankedMovers

MIB = 1 << 20
STRIDE = 8192
BLOCK = 5000
XXH3 = ChecksumAlgorithm.XXH3_64


@dataclass
class FileLike:
    """A medium that is not addressable, as a file is."""

    tier: Tier = Tier.NVME
    segment_bytes: int = 2 * MIB
    data: bytearray = field(default_factory=lambda: bytearray(2 * MIB))

    def read(self, segment_index: int, offset_bytes: int, target: memoryview) -> None:
        target[:] = memoryview(self.data)[offset_bytes : offset_bytes + target.nbytes]

    def write(self, segment_index: int, offset_bytes: int, source: memoryview) -> None:
        self.data[offset_bytes : offset_bytes + source.nbytes] = source

    def view(self, segment_index: int, offset_bytes: int, length_bytes: int) -> memoryview | None:
        return None


@pytest.fixture
def dram() -> Iterator[DramMedium]:
    medium = DramMedium(2 * MIB, 2)
    yield medium
    medium.close()


@pytest.fixture
def movers() -> Iterator[Movers]:
    pool = Movers(thread_count=2, queue_limit=4)
    yield pool
    pool.close()


def fill(medium: Medium, count: int) -> np.ndarray:
    """Random blocks at the beginning of segment 0, with garbage between them; their checksums."""
    data = np.random.default_rng(1).integers(0, 256, count * STRIDE, dtype=np.uint8).tobytes()
    medium.write(0, 0, memoryview(data))
    sums = [xxhash.xxh3_64_intdigest(data[i * STRIDE : i * STRIDE + BLOCK]) for i in range(count)]
    return np.array(sums, dtype=np.uint64)


def copy_job(source: Medium, target: Medium, sums: np.ndarray) -> CopyJob:
    return CopyJob(source, 0, 0, target, 0, 64 * STRIDE, STRIDE, BLOCK, sums, XXH3)


def test_checksums_are_xxh3_64_of_the_blocks_alone() -> None:
    data = memoryview(bytes(range(256)) * 64)
    found = checksums(data, 4096, 100, 3, XXH3)
    assert found.tolist() == [xxhash.xxh3_64_intdigest(data[i * 4096 : i * 4096 + 100]) for i in range(3)]
    assert checksum(data[:100], XXH3) == found[0]


@pytest.mark.parametrize("way", ["dram to dram", "dram to file", "file to dram", "file to file"])
async def test_a_copy_is_verified_block_by_block_on_every_crossing(
    way: str, dram: DramMedium, movers: Movers
) -> None:
    first, _, second = way.split()
    source: Medium = dram if first == "dram" else FileLike()
    target: Medium = source if first == second else FileLike() if first == "dram" else dram
    sums = fill(source, 8)
    spoilt = memoryview(bytearray(1))
    source.read(0, 3 * STRIDE + 17, spoilt)
    spoilt[0] ^= 1
    source.write(0, 3 * STRIDE + 17, spoilt)
    result = await movers.run(copy_job(source, target, sums))
    assert np.flatnonzero(result.bad).tolist() == [3]
    copied = memoryview(bytearray(STRIDE))
    target.read(0, 64 * STRIDE, copied)
    assert checksum(copied[:BLOCK], XXH3) == sums[0]


@pytest.mark.parametrize("kind", ["dram", "file"])
async def test_verification_finds_the_bad_block(kind: str, dram: DramMedium, movers: Movers) -> None:
    medium: Medium = dram if kind == "dram" else FileLike()
    sums = fill(medium, 4)
    medium.write(0, STRIDE, memoryview(b"scribble"))
    result = await movers.run(VerifyJob(medium, 0, 0, STRIDE, BLOCK, sums, XXH3))
    assert result.bad.tolist() == [False, True, False, False]


async def test_bytes_that_do_not_match_are_not_written(dram: DramMedium, movers: Movers) -> None:
    data = memoryview(b"k" * BLOCK)
    good = checksum(data, XXH3)
    refused = await movers.run(FillJob(dram, 0, 0, data, good ^ 1, XXH3))
    assert refused.bad.tolist() == [True]
    assert bytes(dram.view(0, 0, 4)) == b"\0" * 4
    taken = await movers.run(FillJob(dram, 0, 0, data, good, XXH3))
    assert taken.bad.tolist() == [False]
    assert bytes(dram.view(0, 0, BLOCK)) == bytes(data)


async def test_a_segment_is_renewed_on_a_mover(dram: DramMedium, movers: Movers) -> None:
    dram.view(1, 0, 1)[0] = 7
    await movers.run(RenewJob(dram, 1))
    assert dram.view(1, 0, 1)[0] == 0


async def test_what_a_job_raises_reaches_who_waits(movers: Movers) -> None:
    def fail() -> None:
        raise OSError(5, "medium error")

    with pytest.raises(OSError, match="medium error"):
        await movers.run(CallJob(fail))
    assert await movers.run(CallJob(lambda: 42)) == 42
    assert movers.depth == 0


async def test_a_full_queue_is_an_answer(movers: Movers) -> None:
    gate = threading.Event()
    running = [asyncio.ensure_future(movers.run(CallJob(gate.wait))) for _ in range(6)]
    await asyncio.sleep(0)
    assert movers.depth == 6
    with pytest.raises(LimitReached, match="queue_limit") as refused:
        await movers.run(CallJob(gate.wait))
    assert refused.value.reason == "MOVERS_BUSY"
    assert refused.value.retry_after_s is not None
    gate.set()
    assert await asyncio.gather(*running) == [True] * 6
    await movers.drain()
    assert movers.depth == 0


async def test_cancelling_the_waiter_does_not_cancel_the_job(movers: Movers) -> None:
    started, gate, finished = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        gate.wait()
        finished.set()
        raise OSError(5, "nobody waits for this")

    waiter = asyncio.ensure_future(movers.run(CallJob(work)))
    await asyncio.to_thread(started.wait)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert movers.depth == 1
    gate.set()
    await movers.drain()
    assert finished.is_set()


async def test_closed_movers_finish_what_they_took_and_take_no_more() -> None:
    movers = Movers(thread_count=1, queue_limit=8)
    waiting = [asyncio.ensure_future(movers.run(CallJob(lambda: 1))) for _ in range(5)]
    await asyncio.sleep(0)
    movers.close()
    assert await asyncio.gather(*waiting) == [1] * 5
    with pytest.raises(Unavailable):
        await movers.run(CallJob(lambda: 1))


async def test_cranked_movers_do_nothing_until_cranked() -> None:
    movers = CrankedMovers()
    done: list[int] = []
    first = asyncio.ensure_future(movers.run(CallJob(lambda: done.append(1))))
    second = asyncio.ensure_future(movers.run(CallJob(lambda: done.append(2))))
    await asyncio.sleep(0)
    assert (done, movers.depth) == ([], 2)
    assert await movers.crank() == 1
    assert done == [1]
    assert (first.done(), second.done()) == (True, False)
    assert await movers.crank_all() == 1
    assert second.done()
    await movers.drain()
