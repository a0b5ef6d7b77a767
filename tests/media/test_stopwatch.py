"""Calls to a device are timed, also while they hang."""

from __future__ import annotations

import threading

import pytest
from prefixd_server.base.clock import ManualClock
from prefixd_server.media.stopwatch import Stopwatch


def test_a_call_counts_when_it_has_ended_until_somebody_has_looked() -> None:
    clock = ManualClock()
    stopwatch = Stopwatch(clock)
    with stopwatch.call():
        clock.advance(2.0)
    with stopwatch.call():
        clock.advance(1.0)
    assert stopwatch.under_way_s() == 0.0
    assert stopwatch.slowest_s() == pytest.approx(2.0)
    assert stopwatch.slowest_s() == 0.0


def test_a_call_that_hangs_counts_for_as_long_as_it_has_lasted() -> None:
    clock = ManualClock()
    stopwatch = Stopwatch(clock)
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        with stopwatch.call():
            begun.set()
            assert go_on.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    assert begun.wait(10)
    with stopwatch.call():
        clock.advance(3.0)
    assert stopwatch.under_way_s() == pytest.approx(3.0)
    assert [stopwatch.slowest_s(), stopwatch.slowest_s()] == [pytest.approx(3.0)] * 2
    go_on.set()
    thread.join()
    assert stopwatch.under_way_s() == 0.0


def test_a_call_that_fails_has_ended_too() -> None:
    clock = ManualClock()
    stopwatch = Stopwatch(clock)

    def fail() -> None:
        with stopwatch.call():
            clock.advance(1.0)
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        fail()
    assert stopwatch.under_way_s() == 0.0
    assert stopwatch.slowest_s() == pytest.approx(1.0)
