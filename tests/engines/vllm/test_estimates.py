"""Load or compute: decided by what this engine has measured of both."""

from __future__ import annotations

import pytest
from prefixd_client.connectors.vllm.estimates import LOAD_OVERHEAD_S, Estimates, Rate

TOKENS = 16


@pytest.fixture
def estimates() -> Estimates:
    """Of an engine that has measured nothing."""
    return Estimates(TOKENS, wait_max_s=2.0)


def test_without_measurements_everything_is_loaded(estimates) -> None:
    assert estimates.load_pays(1)
    estimates.computed(0.001, 1000)
    assert estimates.load_pays(1)
    assert estimates.compute_s(1) == pytest.approx(TOKENS * 1e-6)


def test_what_comes_sooner_is_done(estimates) -> None:
    estimates.computed(1.0, 1000)
    estimates.loaded(LOAD_OVERHEAD_S + 0.01, 10)
    assert estimates.load_pays(10)
    slow = Estimates(TOKENS, wait_max_s=2.0)
    slow.computed(0.01, 1000)
    slow.loaded(1.0, 10)
    assert not slow.load_pays(10)


def test_a_load_too_small_for_its_round_trips_is_computed(estimates) -> None:
    estimates.computed(0.1, 1000)
    estimates.loaded(LOAD_OVERHEAD_S + 0.001, 100)
    assert not estimates.load_pays(1)
    assert estimates.load_pays(100)


def test_a_way_that_was_slow_once_is_tried_again(estimates) -> None:
    estimates.computed(0.1, 160)
    estimates.loaded(1.0, 10)
    answers = [estimates.load_pays(10) for _ in range(12)]
    assert answers[0] is False
    assert answers[-1] is True


def test_nobody_waits_longer_than_computing_takes(estimates) -> None:
    assert estimates.wait_s(10) == 2.0
    estimates.computed(0.5, 10 * TOKENS)
    assert estimates.wait_s(10) == pytest.approx(0.5)
    assert estimates.wait_s(1000) == 2.0


def test_the_few_tokens_behind_a_hit_say_nothing_about_the_others(estimates) -> None:
    estimates.computed(0.5, 1000)
    estimates.computed(0.5, 3 * TOKENS)
    assert estimates.compute_s(1) == pytest.approx(TOKENS * 0.0005)


def test_a_rate_follows_what_was_measured_lately() -> None:
    rate = Rate()
    assert rate.of(1) is None
    rate.measured(0.0, 0)
    assert rate.of(1) is None
    for _ in range(30):
        rate.measured(1.0, 10)
    assert rate.of(10) == pytest.approx(1.0)
    for _ in range(30):
        rate.measured(4.0, 10)
    assert rate.of(10) == pytest.approx(4.0, rel=0.01)
