"""app/tables.py: what an operator reads."""

from __future__ import annotations

import pytest
from prefixd.v1 import admin_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.app import tables


def test_a_tier_that_is_not_ready_says_why_and_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    tables.stats(
        wire.GetStatsResponse(
            tiers=[
                wire.TierStats(tier=types_pb2.TIER_DRAM, state="ready", slot_count=4096),
                wire.TierStats(
                    tier=types_pb2.TIER_NVME,
                    state="paused",
                    state_reason="Input/output error [sda]",
                    fault_counts={"io_error": 1200, "slow": 1, "disk_full": 0},
                ),
            ]
        )
    )
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["DRAM", "ready", "0", "B", "0", "B", "0", "B", "4,096", "0", "0", "0", "0"] in lines
    assert "NVME is paused: Input/output error [sda]\n" in text
    assert text.endswith("NVME faults: 1,200 io_error, 1 slow\n")


def test_links_reasons_and_the_mode_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = wire.Traffic(
        links=[wire.LinkStats(name="dram-nvme", demand_bytes=1 << 20, background_share=0.5)],
        transfers=[
            wire.TransferTotal(reason="hot", block_count=2_000),
            wire.TransferTotal(reason="watermark"),
        ],
        conservative=True,
        conservative_reason="DRAM is held",
    )
    tables.stats(wire.GetStatsResponse(traffic=traffic))
    text = capsys.readouterr().out
    assert "dram-nvme  1 MiB" in " ".join(text.split(" ")).replace("   ", "  ")
    assert "transferred blocks: 2,000 hot\n" in text
    assert text.endswith("conservative mode is on: DRAM is held; background copies rest\n")
