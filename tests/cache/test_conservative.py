"""When conservative mode begins and ends, and what it says."""

from __future__ import annotations

import pytest
from prefixd_server.cache.conservative import ENTER_AFTER_S, LEAVE_AFTER_S, ConservativeMode, Setting

LINK = "the DRAM-NVMe link"


def fed(mode: ConservativeMode, pressure: float, since: float, span_s: float) -> float:
    """Observes a steady pressure for a time; when that ends."""
    at = since
    while at < since + span_s:
        mode.observe({LINK: pressure, "DRAM": 0.1}, at)
        at += 0.05
    return at


def test_it_begins_once_a_pressure_has_stayed_high_and_says_which() -> None:
    mode = ConservativeMode(Setting.AUTO, 0.0)
    at = fed(mode, 0.95, 0.0, ENTER_AFTER_S * 0.8)
    assert not mode.mode.on
    fed(mode, 0.95, at, ENTER_AFTER_S)
    assert mode.mode.on
    assert LINK in mode.mode.reason
    assert mode.entered_count == 1


def test_a_short_peak_does_not_begin_it() -> None:
    mode = ConservativeMode(Setting.AUTO, 0.0)
    at = 0.0
    for _ in range(20):
        at = fed(mode, 0.95, at, ENTER_AFTER_S * 0.8)
        at = fed(mode, 0.75, at, 0.1)
    assert not mode.mode.on


def test_it_ends_only_after_the_pressure_has_stayed_low_for_longer() -> None:
    mode = ConservativeMode(Setting.AUTO, 0.0)
    at = fed(mode, 1.0, 0.0, 2.0)
    at = fed(mode, 0.7, at, 10.0)
    assert mode.mode.on, "between the marks nothing changes"
    at = fed(mode, 0.5, at, LEAVE_AFTER_S * 0.8)
    assert mode.mode.on
    fed(mode, 0.5, at, LEAVE_AFTER_S)
    assert (mode.mode.on, mode.mode.reason) == (False, "")


@pytest.mark.parametrize(("setting", "pressure", "on"), [(Setting.ON, 0.0, True), (Setting.OFF, 1.0, False)])
def test_the_operators_word_outranks_what_is_measured(setting: Setting, pressure: float, on: bool) -> None:
    mode = ConservativeMode(Setting.AUTO, 0.0)
    mode.set(setting, 0.0)
    fed(mode, pressure, 0.0, 60.0)
    assert mode.mode.on is on
    assert "operator" in mode.mode.reason
    mode.set(Setting.AUTO, 60.0)
    fed(mode, pressure, 60.0, 60.0)
    assert mode.mode.on is (pressure > 0.5)
