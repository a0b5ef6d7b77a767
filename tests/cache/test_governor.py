"""Who may copy when on a link, on virtual time: a drive that serves one piece after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
from prefixd_server.base.work import Errand, Reason, Urgency
from prefixd_server.cache.governor import Governor
from prefixd_server.cache.pace import Pace

from tests.support.virtual_time import run_virtually

MIB = 1 << 20
RATE = 1e9
TARGET_S = 0.05
DEMAND = (Urgency.DEMAND, Reason.DEMANDED)
PREFETCH = (Urgency.PREFETCH, Reason.ASKED_AHEAD)
DEMOTION = (Urgency.DEMOTION, Reason.WATERMARK)


class Drive:
    """One queue, served in order, with a governor before it."""

    def __init__(self, share: float = 0.5) -> None:
        self.pace = Pace(TARGET_S)
        self.governor = Governor("test", share, self.pace)
        self._queue = asyncio.Lock()
        self.order: list[str] = []

    async def copy(self, errand: Errand, size_bytes: int, name: str = "") -> None:
        async with self.governor.turn(errand, size_bytes, "up"), self._queue:
            await asyncio.sleep(size_bytes / RATE)
            self.order.append(name)

    async def saturate(self, kind: tuple[Urgency, Reason], size_bytes: int = 4 * MIB) -> None:
        """More background work than the drive can do, for ever."""

        async def one() -> None:
            while True:
                await self.copy(Errand(*kind), size_bytes)

        await asyncio.gather(*(one() for _ in range(8)))


def now() -> float:
    return asyncio.get_running_loop().time()


async def alongside(background: Coroutine[Any, Any, None], span_s: float) -> None:
    """Lets background work go on for a time."""
    task = asyncio.ensure_future(background)
    await asyncio.sleep(span_s)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def demand_p99_s(busy: bool, load: float = 0.4) -> float:
    """p99 of demand reads of 8 MiB that come at random, with and without migration beside them."""

    async def work() -> float:
        drive, rng = Drive(), np.random.default_rng(7)
        background = asyncio.ensure_future(drive.saturate(DEMOTION)) if busy else None
        seconds: list[float] = []

        async def read() -> None:
            began = now()
            await drive.copy(Errand(*DEMAND), 8 * MIB)
            seconds.append(now() - began)

        reads = []
        for gap in rng.exponential(8 * MIB / RATE / load, 4000):
            await asyncio.sleep(gap)
            reads.append(asyncio.ensure_future(read()))
        await asyncio.gather(*reads)
        if background is not None:
            assert drive.governor.bytes_by_urgency[Urgency.DEMOTION] > 1000 * MIB, "it did go on"
            background.cancel()
            with suppress(asyncio.CancelledError):
                await background
        return float(np.percentile(seconds, 99))

    return run_virtually(work)


def test_demand_reads_keep_their_p99_beside_saturating_migration() -> None:
    alone, beside = demand_p99_s(busy=False), demand_p99_s(busy=True)
    assert alone < beside <= 1.5 * alone


def test_an_idle_link_is_lent_to_the_background_whole() -> None:
    async def work() -> None:
        drive = Drive(share=0.25)
        await alongside(drive.saturate(DEMOTION), 10.0)
        assert drive.governor.bytes_by_urgency[Urgency.DEMOTION] > 0.95 * 10 * RATE

    run_virtually(work)


def test_beside_demand_the_background_keeps_to_its_share() -> None:
    async def work() -> None:
        drive = Drive(share=0.25)

        async def demand() -> None:
            while True:
                await drive.copy(Errand(*DEMAND), 1 * MIB)
                await asyncio.sleep(0.02)

        steady = asyncio.ensure_future(demand())
        await asyncio.sleep(0.5)
        await alongside(drive.saturate(DEMOTION), 20.0)
        steady.cancel()
        share = drive.governor.bytes_by_urgency[Urgency.DEMOTION] / (20 * RATE)
        assert 0.15 < share <= 0.26

    run_virtually(work)


def test_demand_goes_before_prefetch_and_prefetch_before_demotion() -> None:
    async def work() -> None:
        drive = Drive()
        kinds = [DEMOTION, DEMOTION, PREFETCH, DEMAND, DEMOTION, PREFETCH, DEMAND]
        first = asyncio.ensure_future(drive.copy(Errand(*DEMAND), MIB))
        await asyncio.sleep(0)
        rest = [asyncio.ensure_future(drive.copy(Errand(*kind), MIB, kind[0].name.lower())) for kind in kinds]
        await asyncio.gather(first, *rest)
        assert drive.order[1:] == ["demand"] * 2 + ["prefetch"] * 2 + ["demotion"] * 3

    run_virtually(work)


def test_whoever_begins_to_wait_for_a_prefetch_makes_it_demand() -> None:
    async def work() -> None:
        drive = Drive()
        drive.pace.keep_quiet("engine", 60.0, now())
        errand = Errand(*PREFETCH)
        copying = asyncio.ensure_future(drive.copy(errand, MIB))
        await asyncio.sleep(1.0)
        assert not copying.done()
        errand.urgency = Urgency.DEMAND
        drive.governor.urged()
        began = now()
        await copying
        assert now() - began < 0.01
        assert drive.governor.bytes_by_urgency[Urgency.DEMAND] == MIB

    run_virtually(work)


def test_a_decode_latency_above_its_target_shrinks_the_background_within_a_second_and_it_comes_back() -> None:
    async def work() -> None:
        drive = Drive()
        background = asyncio.ensure_future(drive.saturate(DEMOTION))
        done = [0]

        async def rate_during(latency_s: float, span_s: float) -> float:
            for _ in range(int(span_s / 0.05)):
                drive.pace.observe(latency_s, now())
                await asyncio.sleep(0.05)
            done.append(drive.governor.bytes_by_urgency[Urgency.DEMOTION])
            return (done[-1] - done[-2]) / span_s / RATE

        assert await rate_during(0.9 * TARGET_S, 3.0) > 0.9
        await rate_during(1.1 * TARGET_S, 1.0)
        assert drive.governor.factor() <= 0.25
        assert await rate_during(1.1 * TARGET_S, 2.0) < 0.1
        await rate_during(0.9 * TARGET_S, 6.0)
        assert await rate_during(0.9 * TARGET_S, 3.0) > 0.9
        background.cancel()

    run_virtually(work)


def test_in_a_quiet_period_there_is_no_background_work_and_demand_goes_on() -> None:
    async def work() -> None:
        drive = Drive()
        background = asyncio.ensure_future(drive.saturate(PREFETCH))
        await asyncio.sleep(1.0)
        drive.pace.keep_quiet("engine", 2.0, now())
        await asyncio.sleep(0.05)
        before = drive.governor.bytes_by_urgency[Urgency.PREFETCH]
        began = now()
        await drive.copy(Errand(*DEMAND), MIB)
        assert now() - began < 0.002
        await asyncio.sleep(1.5)
        assert drive.governor.bytes_by_urgency[Urgency.PREFETCH] == before
        await asyncio.sleep(2.0)
        assert drive.governor.bytes_by_urgency[Urgency.PREFETCH] > before
        background.cancel()

    run_virtually(work)


def test_an_engine_can_end_its_own_quiet_period_and_no_other() -> None:
    pace = Pace(0.0)
    pace.keep_quiet("one", 10.0, 0.0)
    pace.keep_quiet("other", 600.0, 0.0)
    pace.keep_quiet("one", 0.0, 1.0)
    assert pace.factor(1.0) == 0.0
    assert pace.quiet_for(1.0) == 59.0
    pace.keep_quiet("other", 0.0, 1.0)
    assert pace.factor(1.0) == 1.0


def test_a_wait_that_is_cancelled_leaves_its_place_to_others() -> None:
    async def work() -> None:
        drive = Drive()
        first = asyncio.ensure_future(drive.copy(Errand(*DEMAND), MIB))
        await asyncio.sleep(0)
        given_up = [asyncio.ensure_future(drive.copy(Errand(*DEMOTION), MIB)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.gather(first, *given_up, return_exceptions=True)
        await alongside(drive.saturate(DEMOTION), 5.0)
        assert drive.governor.bytes_by_urgency[Urgency.DEMOTION] > 3 * RATE

    run_virtually(work)


def test_a_link_that_is_kept_for_demand_gives_up_what_waits_and_serves_the_others() -> None:
    async def work() -> None:
        drive, granted = Drive(), []

        async def piece(kind: tuple[Urgency, Reason]) -> None:
            async with drive.governor.turn(Errand(*kind), MIB, "up") as turn:
                granted.append((kind[0], turn))
                await asyncio.sleep(1.0)

        under_way = asyncio.ensure_future(piece(DEMAND))
        await asyncio.sleep(0.1)
        waiting = [asyncio.ensure_future(piece(kind)) for kind in (PREFETCH, DEMOTION)]
        await asyncio.sleep(0.1)
        assert granted == [(Urgency.DEMAND, True)]
        drive.governor.keep_for_demand(True)
        await asyncio.sleep(0.1)
        await piece(DEMOTION)
        await piece(DEMAND)
        assert granted[1:4] == [
            (Urgency.PREFETCH, False),
            (Urgency.DEMOTION, False),
            (Urgency.DEMOTION, False),
        ]
        assert granted[4:] == [(Urgency.DEMAND, True)]
        drive.governor.keep_for_demand(False)
        await asyncio.gather(under_way, *waiting, piece(DEMOTION))
        assert granted[-1] == (Urgency.DEMOTION, True)
        assert drive.governor.bytes_by_urgency == {
            Urgency.DEMAND: 2 * MIB,
            Urgency.PREFETCH: 0,
            Urgency.DEMOTION: MIB,
        }

    run_virtually(work)


def test_the_rate_is_measured_while_busy_and_tells_when_bytes_will_be_there() -> None:
    async def work() -> None:
        drive = Drive()
        assert drive.governor.estimate_s(MIB, "up") is None
        for _ in range(20):
            await drive.copy(Errand(*DEMAND), 8 * MIB)
            await asyncio.sleep(0.1)
        estimate = drive.governor.estimate_s(100 * MIB, "up")
        assert estimate is not None
        assert abs(estimate - 100 * MIB / RATE) < 0.01 * estimate

    run_virtually(work)
