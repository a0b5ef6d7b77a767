"""The seam for time. Everything that asks for the time gets a Clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Monotonic seconds; what leases and policy use."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for people and for what outlives the process."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """See Clock."""
        return time.monotonic()

    def wall(self) -> float:
        """See Clock."""
        return time.time()


class ManualClock:
    """A clock that moves only when told: for tests and for the simulator."""

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def now(self) -> float:
        """See Clock."""
        return self._now

    def wall(self) -> float:
        """See Clock."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward. Raises ValueError when asked to move back."""
        if seconds < 0:
            raise ValueError(f"a clock does not run backwards: advance({seconds})")
        self._now += seconds
        self._wall += seconds
