"""What is advised for a node of several tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefixd_server.simulate.advice import advise_tiers
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.study import TraceSource
from prefixd_server.simulate.tier_study import TierJob, run_tier_job
from prefixd_server.simulate.tiers import TierSizes

OVERLOADED = "The links cannot keep up"


def advice_for(directory: Path, hashes: list[list[int]], *, apart_ms: int, queue_s: float = 0.0) -> str:
    """On a node with NVMe, for requests that come so far apart; blocks of 1 GiB."""
    path = directory / "log.jsonl"
    lines = [
        f'{{"timestamp_ms": {at * apart_ms}, "input_length": {512 * len(ids)}, "output_length": 1, '
        f'"block_tokens": 512, "hash_ids": {ids}}}\n'
        for at, ids in enumerate(hashes)
    ]
    path.write_text("".join(lines))
    sizes = TierSizes(0, 40 << 30, 80 << 30, kv_bytes_per_token=1 << 21)
    outcome = run_tier_job(TierJob(TraceSource(path), "lru", sizes, 0, ServingModel(), True, queue_s))
    return "\n".join(advise_tiers([outcome], "log"))


def test_links_that_are_late_by_more_than_the_last_request_needs_are_told_of(tmp_path: Path) -> None:
    many = [list(range(first, first + 10)) for first in range(0, 2000, 10)]
    assert OVERLOADED in advice_for(tmp_path, many, apart_ms=10)


@pytest.mark.parametrize("queue_s", [0.0, 60.0])
def test_links_that_carry_the_last_requests_bytes_keep_up(tmp_path: Path, queue_s: float) -> None:
    few = [[0, 1], [0, 1, 2], [0, 1, 3]]
    assert OVERLOADED not in advice_for(tmp_path, few, apart_ms=2000, queue_s=queue_s)
    assert OVERLOADED not in advice_for(tmp_path, few[:1], apart_ms=1, queue_s=queue_s)
