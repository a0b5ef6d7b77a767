"""The write budget holds in every 24 hours, and across restarts and kills."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.files import RealFiles
from prefixd_server.cache.write_budget import HOUR_S, WriteBudget
from prefixd_server.media.movers import Movers

from tests.support.faulty_files import DISK_BROKEN, FaultyFiles

LIMIT = 6400
UNIT = 100
DAY_S = 24 * HOUR_S


@pytest.fixture
def movers() -> Iterator[Movers]:
    made = Movers(1, 16)
    yield made
    made.close()


def budget(
    directory: Path,
    clock: ManualClock,
    movers: Movers,
    files: RealFiles | None = None,
    limit_bytes: int = LIMIT,
) -> WriteBudget:
    return WriteBudget(limit_bytes, clock, files or RealFiles(), directory / "WRITTEN", movers)


@pytest.mark.parametrize("seed", range(5))
async def test_no_24_hours_see_more_than_the_limit_whoever_is_killed_when(
    tmp_path: Path, movers: Movers, seed: int
) -> None:
    rng, clock = random.Random(seed), ManualClock()
    counted = budget(tmp_path, clock, movers)
    written: list[tuple[float, int]] = []
    for _ in range(400):
        clock.advance(rng.expovariate(1 / 1800))
        booking = await counted.book(rng.randint(0, 2000), UNIT)
        spent = rng.randint(0, booking.unit_count) * UNIT
        counted.give_back(booking, booking.unit_count * UNIT - spent)
        written.append((clock.now(), spent))
        last_day = [count for at, count in written if at > clock.now() - DAY_S]
        assert sum(last_day) <= LIMIT
        if rng.random() < 0.05:
            counted = budget(tmp_path, clock, movers)
    assert sum(count for _, count in written) > LIMIT, "a budget that gives nothing proves nothing"


async def test_all_of_it_can_be_used_and_comes_back_a_day_later(tmp_path: Path, movers: Movers) -> None:
    clock = ManualClock()
    counted = budget(tmp_path, clock, movers)
    assert (await counted.book(2 * LIMIT, UNIT)).unit_count == LIMIT // UNIT
    assert (await counted.book(UNIT, UNIT)).unit_count == 0
    clock.advance(DAY_S - HOUR_S)
    assert (await counted.book(UNIT, UNIT)).unit_count == 0
    clock.advance(2 * HOUR_S)
    assert (await counted.book(2 * LIMIT, UNIT)).unit_count == LIMIT // UNIT


async def test_a_restart_forgets_nothing_that_was_written(tmp_path: Path, movers: Movers) -> None:
    clock = ManualClock()
    await budget(tmp_path, clock, movers).book(LIMIT - UNIT, UNIT)
    assert (await budget(tmp_path, clock, movers).book(LIMIT, UNIT)).unit_count <= 1


async def test_a_limit_below_what_was_written_already_gives_nothing_until_that_is_a_day_ago(
    tmp_path: Path, movers: Movers
) -> None:
    clock = ManualClock()
    await budget(tmp_path, clock, movers).book(LIMIT, UNIT)
    lowered = budget(tmp_path, clock, movers, limit_bytes=LIMIT // 4)
    assert (await lowered.book(UNIT, UNIT)).unit_count == 0
    clock.advance(DAY_S + HOUR_S)
    assert (await lowered.book(LIMIT, UNIT)).unit_count == LIMIT // 4 // UNIT


async def test_what_a_clock_that_was_ahead_has_dated_counts_for_a_day_once_it_is_put_right(
    tmp_path: Path, movers: Movers
) -> None:
    ahead, right = ManualClock(wall=1_900_000_000.0), ManualClock()
    await budget(tmp_path, ahead, movers).book(LIMIT, UNIT)
    assert (await budget(tmp_path, right, movers).book(UNIT, UNIT)).unit_count == 0
    right.advance(DAY_S + HOUR_S)
    assert (await budget(tmp_path, right, movers).book(LIMIT, UNIT)).unit_count == LIMIT // UNIT


async def test_a_file_that_cannot_be_read_counts_as_a_budget_spent(tmp_path: Path, movers: Movers) -> None:
    clock = ManualClock()
    (tmp_path / "WRITTEN").write_text("{")
    counted = budget(tmp_path, clock, movers)
    assert (await counted.book(UNIT, UNIT)).unit_count == 0
    clock.advance(DAY_S + HOUR_S)
    assert (await counted.book(UNIT, UNIT)).unit_count == 1


async def test_what_the_disk_cannot_remember_is_not_booked(tmp_path: Path, movers: Movers) -> None:
    files = FaultyFiles()
    counted = budget(tmp_path, ManualClock(), movers, files)
    files.fail("sync_data", DISK_BROKEN)
    with pytest.raises(OSError, match="WRITTEN"):
        await counted.book(UNIT, UNIT)
    assert counted.booked_bytes == 0
    assert (await counted.book(UNIT, UNIT)).unit_count == 1


async def test_no_limit_costs_nothing(tmp_path: Path, movers: Movers) -> None:
    counted = WriteBudget(0, ManualClock(), RealFiles(), tmp_path / "WRITTEN", movers)
    assert (await counted.book(10**15, UNIT)).unit_count == 10**13
    assert not (tmp_path / "WRITTEN").exists()
