"""The governor and conservative mode in the whole node: demand reads beside migration on one slow drive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

from prefixd_server.base.types import Tier
from prefixd_server.base.work import Errand, Reason, Urgency
from prefixd_server.cache.conservative import Setting
from prefixd_server.cache.migration import DRAM_NVME

from tests.support.modelled_node import ModelledNode, run_of
from tests.support.storm import BLOCK_BYTES, DRAM_BYTES, NVME_BYTES, RATE, RUN_BLOCKS, RUN_BYTES, storm

READS = 300
STORM_READS = 600
STORM_LOAD, STORM_SKEW = 1.42, 0.6
"""A part of it is in DRAM; what is left keeps the drive busy to nine tenths."""
STORM_SEEDS = (1, 2, 3)


def test_demand_keeps_its_p99_while_migration_saturates(tmp_path: Path) -> None:
    alone = storm(tmp_path / "alone", "on", load=0.5, read_count=READS)
    beside = storm(tmp_path / "beside", "off", load=0.5, read_count=READS)
    assert alone.demoted_bytes == alone.lost_count == beside.lost_count == 0
    assert beside.demoted_bytes / beside.span_s > 0.05 * RATE
    assert beside.percentile(99) <= 1.5 * alone.percentile(99)


def test_conservative_mode_gives_back_what_waits_for_its_turn(
    tmp_path: Path,
) -> None:
    node = ModelledNode(tmp_path, DRAM_BYTES, NVME_BYTES, RATE, BLOCK_BYTES)
    try:
        node.run(_begin_and_stop(node))
    finally:
        node.close()


async def _begin_and_stop(node: ModelledNode) -> None:
    cache = node.cache
    assert cache.storage is not None
    table = cache.state.catalog.slots[Tier.DRAM]
    demand = Errand(Urgency.DEMAND, Reason.DEMANDED)
    async with cache.migration.governors[DRAM_NVME].turn(demand, 0, Tier.NVME.name):
        for number in range(DRAM_BYTES // RUN_BYTES):
            node.store(run_of(number, RUN_BLOCKS))
            await asyncio.sleep(0.02)
        assert table.leased_count == len(cache.storage.transfers.claimed) > 0
        cache.migration.set_conservative(Setting.ON)
        await asyncio.sleep(0.02)
        assert table.leased_count == len(cache.storage.transfers.claimed) == 0
    assert cache.state.catalog.slots[Tier.NVME].counts().reserved == 0
    assert cache.storage.nvme.written_bytes == 0


def test_conservative_mode_helps_demand_through_a_storm_says_why_and_leaves(tmp_path: Path) -> None:
    without, helped = (
        [
            storm(tmp_path / f"{setting}{seed}", setting, STORM_LOAD, STORM_READS, STORM_SKEW, seed)
            for seed in STORM_SEEDS
        ]
        for setting in ("off", "auto")
    )
    for one, other in zip(without, helped, strict=True):
        assert other.entered_count >= 1
        assert "has been above 90% for 0.5 s" in other.reasons[0]
        assert other.left
        assert other.demoted_bytes <= one.demoted_bytes  # little: demand goes first without the mode too
        assert other.lost_count == 0
        assert other.reads_per_s >= 0.95 * one.reads_per_s
    pairs = list(zip(without, helped, strict=True))
    for share in (99, 99.9):
        assert median(other.percentile(share) / one.percentile(share) for one, other in pairs) < 1.0
