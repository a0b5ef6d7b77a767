"""Prefetches in the node, on virtual time over a slow drive: what is brought, held, used and let go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd_server.base.config import MigrationConfig
from prefixd_server.base.types import Hashes, PrefetchRun, RequestPhase, Tier, UsageReport
from prefixd_server.base.work import Reason
from prefixd_server.cache.conservative import Setting

from tests.support.modelled_node import MIB, TENANT, ModelledNode, run_of

BLOCK_BYTES = 65_536
LENGTH = 32
RATE = 1e9


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ModelledNode]:
    made = ModelledNode(
        tmp_path, 16 * MIB, 64 * MIB, RATE, BLOCK_BYTES, MigrationConfig(prefetch_share_max=0.25)
    )
    made.cache.set_policy("lru")  # what is stored first falls out first, whatever is learned
    yield made
    made.close()


def where(node: ModelledNode, run: Hashes) -> tuple[tuple[Tier, int], ...]:
    """Hits of a run by tier."""
    return node.cache.lookup(TENANT, node.ref, run).hits


def cold(node: ModelledNode, *numbers: int) -> list[Hashes]:
    """Runs that NVMe alone has."""
    runs = [run_of(number, LENGTH) for number in numbers]

    fallen = [((Tier.NVME, LENGTH),)] * len(runs)

    async def fall_out() -> None:
        others = (run_of(1000 + number, LENGTH) for number in range(20))
        for number, run in enumerate([*runs, *others]):
            assert node.store(run) == LENGTH, number
            await asyncio.sleep(0.1)
            if [where(node, run) for run in runs] == fallen:
                return

    node.run(fall_out())
    assert [where(node, run) for run in runs] == fallen
    return runs


def ask(node: ModelledNode, run: Hashes, position: int = 0, deadline_s: float | None = None) -> bytes:
    """A Prefetch of one run; its token."""
    wanted = [PrefetchRun(node.ref, run, position, deadline_s)]
    return node.cache.prefetch(TENANT, node.session.session_id, wanted)[0]


def pass_time(node: ModelledNode, seconds: float) -> None:
    """Virtual time goes by."""
    node.run(asyncio.sleep(seconds))


def test_a_queued_request_finds_its_run_in_dram(node: ModelledNode) -> None:
    (run,) = cold(node, 1)
    node.report(UsageReport(node.ref, "r", RequestPhase.QUEUED, hashes=run))
    pass_time(node, 0.2)
    assert where(node, run) == ((Tier.DRAM, LENGTH),)
    answer = node.acquire(run, "r")
    assert answer.run.hits == ((Tier.DRAM, LENGTH),)
    counters = node.cache.prefetching.holds.counters
    assert counters.used_bytes == counters.brought_bytes == LENGTH * BLOCK_BYTES
    assert counters.useless_bytes == node.cache.prefetching.count == 0
    assert node.cache.migration.counts[Reason.QUEUED_REQUEST].block_count == LENGTH
    node.run(node.release(answer))


def test_what_is_held_outlives_what_is_stored_after_it(node: ModelledNode) -> None:
    (run,) = cold(node, 1)
    ask(node, run)
    pass_time(node, 0.2)
    for number in range(20):
        node.store(run_of(2000 + number, LENGTH))
        pass_time(node, 0.05)
    assert where(node, run) == ((Tier.DRAM, LENGTH),)


@pytest.mark.parametrize("end", ["cancelled", "deadline", "session"])
def test_what_nobody_asks_for_is_let_go_and_counted_as_useless(node: ModelledNode, end: str) -> None:
    (run,) = cold(node, 1)
    token = ask(node, run, deadline_s=1.0 if end == "deadline" else None)
    pass_time(node, 0.2)
    assert node.cache.prefetching.holds.waiting_bytes == LENGTH * BLOCK_BYTES
    if end == "cancelled":
        assert node.cache.cancel_prefetches(TENANT, node.session.session_id, [token]) == 1
    elif end == "session":
        node.cache.sessions.transport_lost(node.session.session_id)
    pass_time(node, 1.0)
    counters = node.cache.prefetching.holds.counters
    assert (counters.useless_bytes, counters.used_bytes) == (LENGTH * BLOCK_BYTES, 0)
    assert node.cache.prefetching.holds.waiting_bytes == node.cache.prefetching.count == 0
    assert node.cache.check() == []


def test_an_engine_that_comes_early_joins_the_copy_and_makes_it_urgent(node: ModelledNode) -> None:
    (run,) = cold(node, 1)

    async def early() -> tuple[float, int]:
        node.cache.migration.keep_quiet("one", 30.0)
        ask(node, run)
        node.cache.prefetching.bring(True, None)
        await asyncio.sleep(0.5)
        assert where(node, run) == ((Tier.NVME, LENGTH),), "the quiet period holds it up"
        began = node.loop.time()
        hit = await node.read(run)
        return node.loop.time() - began, hit

    seconds, hit = node.run(early())
    assert hit == LENGTH
    assert seconds < 2 * LENGTH * BLOCK_BYTES / RATE
    (link,) = node.cache.migration.traffic().links
    assert (link.demand_bytes, link.prefetch_bytes) == (LENGTH * BLOCK_BYTES, 0)
    counters = node.cache.prefetching.holds.counters
    assert counters.used_bytes == counters.brought_bytes == LENGTH * BLOCK_BYTES


def test_in_conservative_mode_nothing_is_brought_until_it_ends(node: ModelledNode) -> None:
    (run,) = cold(node, 1)
    node.cache.migration.set_conservative(Setting.ON)
    ask(node, run)
    pass_time(node, 2.0)
    assert where(node, run) == ((Tier.NVME, LENGTH),)
    node.cache.migration.set_conservative(Setting.AUTO)
    pass_time(node, 0.2)
    assert where(node, run) == ((Tier.DRAM, LENGTH),)


def test_the_next_request_is_brought_first_and_no_more_is_held_than_the_share(node: ModelledNode) -> None:
    runs = cold(node, 1, 2, 3)
    for position, run in zip((2, 0, 1), runs, strict=True):
        ask(node, run, position)
    pass_time(node, 1.0)
    held = int(16 * MIB // BLOCK_BYTES * 0.25)
    assert [sum(count for tier, count in where(node, run) if tier is Tier.DRAM) for run in runs] == [
        0,
        LENGTH,
        held - LENGTH,
    ]


def test_a_burst_on_a_cold_prefix_copies_each_block_once(node: ModelledNode) -> None:
    (run,) = cold(node, 1)

    async def burst() -> list[int]:
        return list(await asyncio.gather(*(node.read(run) for _ in range(16))))

    assert node.run(burst()) == [LENGTH] * 16
    assert node.cache.migration.counts[Reason.DEMANDED].block_count == LENGTH


def test_a_run_in_use_is_not_brought_twice_and_one_that_is_gone_is_given_up(node: ModelledNode) -> None:
    (run,) = cold(node, 1)
    node.run(node.read(run))
    ask(node, run)
    ask(node, run_of(77, 4))
    pass_time(node, 0.5)
    assert node.cache.migration.counts[Reason.ASKED_AHEAD].block_count == 0
    assert node.cache.prefetching.count == 2
    assert node.run(node.read(run)) == LENGTH
    assert node.cache.prefetching.count == 1
