"""Times the calls to a device, so that one that hangs is noticed while it hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefixd_server.base.clock import Clock


class Stopwatch:
    """See the module. Thread-safe; a thread makes one call at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        """When the call under way began, by thread; monotonic seconds."""
        self._slowest_s = 0.0
        """Of the calls that ended since slowest_s() was last asked."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call."""
        begun = self._clock.now()
        with self._lock:
            self._begun[threading.get_ident()] = begun
        try:
            yield
        finally:
            with self._lock:
                del self._begun[threading.get_ident()]
                self._slowest_s = max(self._slowest_s, self._clock.now() - begun)

    def slowest_s(self) -> float:
        """The longest of the calls under way, so far, and of those that ended since this was last asked."""
        with self._lock:
            ended, self._slowest_s = self._slowest_s, 0.0
        return max(ended, self.under_way_s())

    def under_way_s(self) -> float:
        """For how long the oldest call under way has lasted; 0 when there is none."""
        with self._lock:
            oldest = min(self._begun.values(), default=None)
        return 0.0 if oldest is None else self._clock.now() - oldest
