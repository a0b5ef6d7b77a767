"""What is to be copied between tiers without a request that waits for it."""

from __future__ import annotations

import pytest
from prefixd_server.policy.placement import Watermarks, demotion_count, worth_promoting
from prefixd_server.policy.prefetch import Wanted, plan

MARKS = Watermarks(high=0.9, low=0.8)


@pytest.mark.parametrize(("free", "wanted"), [(1000, 0), (100, 0), (99, 101), (0, 200)])
def test_demotion_begins_above_the_high_mark_and_reaches_down_to_the_low_one(free: int, wanted: int) -> None:
    assert demotion_count(1000, free, MARKS) == wanted


def test_only_what_comes_back_at_least_twice_within_the_window_is_promoted() -> None:
    assert worth_promoting(use_count=2, gap_s=5.0, window_s=10.0)
    assert not worth_promoting(use_count=2, gap_s=6.0, window_s=10.0)
    assert not worth_promoting(use_count=1, gap_s=0.1, window_s=10.0)


def wanted(number: int, position: int, count: int, deadline: float = 100.0) -> Wanted:
    return Wanted(number, position, deadline, block_bytes=10, block_count=count)


def test_the_request_that_runs_next_is_brought_first_and_whole() -> None:
    runs = [wanted(1, 2, 5), wanted(2, 0, 4), wanted(3, 1, 5)]
    assert plan(runs, budget_bytes=100, bytes_per_s=None, now=0.0) == [(2, 4), (3, 5), (1, 1)]


def test_among_equals_the_nearer_deadline_comes_first_then_who_asked_first() -> None:
    runs = [wanted(3, 0, 1), wanted(1, 0, 1), wanted(2, 0, 1, deadline=50.0)]
    assert [number for number, _ in plan(runs, 30, None, 0.0)] == [2, 1, 3]


def test_what_cannot_arrive_before_its_deadline_is_left_out() -> None:
    runs = [wanted(1, 0, 10, deadline=5.0), wanted(2, 1, 10, deadline=8.0), wanted(3, 2, 10, deadline=9.0)]
    assert plan(runs, 1000, bytes_per_s=10.0, now=0.0) == [(1, 5), (2, 3), (3, 1)]


def test_nothing_is_begun_beyond_the_budget() -> None:
    assert plan([wanted(1, 0, 5)], budget_bytes=9, bytes_per_s=None, now=0.0) == []
    assert plan([], budget_bytes=100, bytes_per_s=1.0, now=0.0) == []
