"""Conservative mode: when a link or a tier stays above its high-water mark, only what is needed goes on.

Prefetch and background migration stop; demand reads and the evictions that are
needed do not. The mode begins when a pressure has been high for a while, and ends
when all have been low for longer: hysteresis in level and in time.

Pure: times are arguments, monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

HIGH = 0.9
"""Pressure that begins the mode once it has lasted for ENTER_AFTER_S."""
LOW = 0.7
"""Pressure below which all must stay for LEAVE_AFTER_S to end it."""
ENTER_AFTER_S = 0.5
LEAVE_AFTER_S = 2.0


class Setting(Enum):
    """What the operator wants."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Mode:
    """Whether conservative mode is on, and why; since when, monotonic seconds."""

    on: bool
    reason: str
    since: float


class ConservativeMode:
    """See the module."""

    def __init__(self, setting: Setting, now: float) -> None:
        self.entered_count = 0
        self._high_since: float | None = None
        self._low_since: float | None = None
        self.setting = Setting.AUTO
        self.mode = Mode(False, "", now)
        self.set(setting, now)

    def set(self, setting: Setting, now: float) -> None:
        """The operator's word."""
        self.setting = setting
        self._high_since = self._low_since = None
        if setting is Setting.ON:
            self._change(True, "set by the operator", now)
        elif setting is Setting.OFF:
            self._change(False, "switched off by the operator", now)
        else:
            self._change(False, "", now)

    def observe(self, pressures: Mapping[str, float], now: float) -> Mode:
        """Takes what is measured now, by name, 0 to 1 each; the mode that follows."""
        if self.setting is not Setting.AUTO:
            return self.mode
        name, highest = max(pressures.items(), key=lambda item: item[1], default=("", 0.0))
        if highest >= HIGH:
            self._high_since = now if self._high_since is None else self._high_since
        else:
            self._high_since = None
        if highest < LOW:
            self._low_since = now if self._low_since is None else self._low_since
        else:
            self._low_since = None
        if not self.mode.on and self._high_since is not None and now - self._high_since >= ENTER_AFTER_S:
            text = f"{name} has been above {HIGH:.0%} for {ENTER_AFTER_S:g} s ({highest:.0%} now)"
            self._change(True, text, now)
        elif self.mode.on and self._low_since is not None and now - self._low_since >= LEAVE_AFTER_S:
            self._change(False, "", now)
        return self.mode

    def _change(self, on: bool, reason: str, now: float) -> None:
        if on != self.mode.on:
            self.entered_count += on
        if (on, reason) != (self.mode.on, self.mode.reason):
            self.mode = Mode(on, reason, now if on != self.mode.on else self.mode.since)
