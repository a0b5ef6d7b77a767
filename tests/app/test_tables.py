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
