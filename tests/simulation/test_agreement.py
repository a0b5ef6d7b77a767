"""The daemon and the simulator agree: the same trace gives the same hits in every tier, within a point.

The daemon's whole cache floor runs on virtual time, with modelled service times at
the seams of engine, disk and index. Arrivals of one timestamp are spread over the 3 s
that the log rounds to. At the smallest size running requests hold nearly all of DRAM.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from prefixd_server.base.types import Tier
from prefixd_server.simulate.traces import read_trace

from tests.support.live_replay import agreement, spread
from tests.support.repository import ROOT

TRACE = ROOT / "tests" / "data" / "traces" / "mooncake_conversation_512.jsonl.zst"
REQUEST_COUNT = 700
POINTS_MAX = 1.0


@pytest.mark.parametrize("policy", ["importance", "lru"])
@pytest.mark.parametrize(("dram_segments", "nvme_segments"), [(2, 10), (4, 26), (8, 14), (8, 0)])
def test_hits_per_tier_are_the_simulators(
    policy: str, dram_segments: int, nvme_segments: int, tmp_path: Path
) -> None:
    trace = spread(read_trace(TRACE).part(0, REQUEST_COUNT))
    found = agreement(trace, tmp_path, dram_segments, nvme_segments, policy)
    assert found.problems == []
    assert set(found.daemon) == {Tier.DRAM, Tier.NVME} if nvme_segments else {Tier.DRAM}
    for tier, percent in found.daemon.items():
        assert abs(percent - found.simulator[tier]) <= POINTS_MAX, f"{tier.name}: {found}"
    assert sum(found.simulator.values()) > 5.0, "a trace without hits proves nothing"
