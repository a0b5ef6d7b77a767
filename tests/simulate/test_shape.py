"""What a trace says of itself, on one small enough to count by hand."""

from __future__ import annotations

import pytest
from prefixd_server.simulate.shape import shape_of

from tests.support.requests import trace_of

RUNS = [[0, 1], [0, 2], [0, 1], [3]]
SHAPE = shape_of(trace_of(RUNS, arrivals_s=[0.0, 3.0, 15.0, 16.0]))


def test_counts_and_ratios() -> None:
    assert (SHAPE.request_count, SHAPE.reference_count, SHAPE.footprint_tokens) == (4, 7, 4 * 512)
    assert SHAPE.reused_block_ratio == 0.5
    assert SHAPE.infinite_hit_token_ratio == pytest.approx(3 / 7)
    assert SHAPE.duration_s == 16.0


def test_times_until_blocks_are_used_again() -> None:
    # Block 0 after 3 s and after 12 s, block 1 after 15 s.
    assert SHAPE.reuse_gap_p50_s == 12.0
    told = dict(zip(SHAPE.gaps.labels, SHAPE.gaps.counts, strict=True))
    assert told["2-5"] == 1
    assert told["10-20"] == 2
    assert sum(SHAPE.gaps.counts) == 3


def test_reuse_distance_is_a_share_of_the_footprint() -> None:
    # Two and two references between uses of block 0, four between those of block 1; 4 blocks in all.
    told = dict(zip(SHAPE.distances.labels, SHAPE.distances.counts, strict=True))
    assert told["30-100"] == 2
    assert told["100-300"] == 1


def test_uses_per_block() -> None:
    assert SHAPE.sharing.counts[:3] == (2, 1, 1)


def test_the_hottest_prefix_ends_where_requests_part() -> None:
    (hot,) = SHAPE.hot
    assert (hot.tokens, hot.request_count, hot.continuation_count) == (512, 3, 2)


def test_a_trace_that_reuses_nothing_has_a_shape_too() -> None:
    shape = shape_of(trace_of([[0], [1]]))
    assert shape.infinite_hit_token_ratio == 0.0
    assert shape.hot == ()
