"""The governor and conservative mode in the whole node: demand reads beside migration on one slow drive."""

from __future__ import annotations

from pathlib import Path

from tests.support.storm import RATE, storm

READS = 300
STORM_READS = 700


def test_demand_keeps_its_p99_while_migration_saturates(tmp_path: Path) -> None:
    alone = storm(tmp_path / "alone", "on", load=0.5, read_count=READS)
    beside = storm(tmp_path / "beside", "off", load=0.5, read_count=READS)
    assert alone.demoted_bytes == alone.lost_count == beside.lost_count == 0
    assert beside.demoted_bytes / beside.span_s > 0.05 * RATE
    assert beside.percentile(99) <= 1.5 * alone.percentile(99)


def test_conservative_mode_helps_demand_through_a_storm_says_why_and_leaves(tmp_path: Path) -> None:
    without = storm(tmp_path / "without", "off", load=0.88, read_count=STORM_READS)
    helped = storm(tmp_path / "with", "auto", load=0.88, read_count=STORM_READS)
    assert helped.entered_count >= 1
    assert "DRAM-NVMe" in helped.reasons[0]
    assert helped.left
    assert helped.demoted_bytes < without.demoted_bytes
    # The governor lets no background piece into a busy stretch, so p99 hardly moves; the tail behind it does.
    assert helped.percentile(99) <= 1.02 * without.percentile(99)
    assert helped.percentile(99.9) < 0.9 * without.percentile(99.9)
    assert helped.reads_per_s >= 0.95 * without.reads_per_s
