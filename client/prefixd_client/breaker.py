"""The circuit breaker of law 2: losing the daemon costs one deadline, once, and then nothing.

Open, it answers "do not ask" in a few hundred nanoseconds. The moment it opens, every call that waits is
cancelled. It decides nothing by itself: calls.py says which failures open it, and the background thread
closes it when the daemon has answered again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

Cancel: TypeAlias = Callable[[], object]
"""Ends a waiting call at once; may be called from any thread, and more than once."""


class Breaker:
    """Open until close() is first called. Thread-safe.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._waiting: dict[int, Cancel] = {}
        """Calls on their way; under the lock."""
        self._next_ticket = 0
        self.is_open = True
        """Read without the lock on the way of every call."""
        self.reason = "no session yet"
        self.opened_at = now()
        self.opened_count = 0

    def enter(self, cancel: Cancel) -> int:
        """Registers a call that is on its way; returns its ticket, -1 when the breaker is open.

        A caller that gets -1 cancels the call itself and treats it as a miss.
        """
        with self._lock:
            if self.is_open:
                return -1
            self._next_ticket += 1
            self._waiting[self._next_ticket] = cancel
            return self._next_ticket

    def leave(self, ticket: int) -> None:
        """The call has ended, however it did."""
        with self._lock:
            self._waiting.pop(ticket, None)

    def open(self, reason: str) -> bool:
        """Opens and cancels every waiting call. Returns False when it was open already."""
        with self._lock:
            if self.is_open:
                return False
            self.is_open = True
            self.reason = reason
            self.opened_at = self._now()
            self.opened_count += 1
            waiting, self._waiting = self._waiting, {}
        for cancel in waiting.values():
            cancel()
        return True

    def close(self) -> bool:
        """The daemon has answered: calls go out again. Returns False when it was closed already."""
        with self._lock:
            was_open, self.is_open = self.is_open, False
            self.reason = ""
            return was_open

    @property
    def open_s(self) -> float:
        """Seconds since it opened; 0 when closed."""
        return self._now() - self.opened_at if self.is_open else 0.0


class Backoff:
    """Pauses between probes: doubling from pause_min_s to pause_max_s, both in seconds."""

    def __init__(self, pause_min_s: float, pause_max_s: float) -> None:
        self._min_s = pause_min_s
        self._max_s = pause_max_s
        self._next_s = pause_min_s

    def next_pause_s(self) -> float:
        """How long to wait before the next probe."""
        pause = self._next_s
        self._next_s = min(self._max_s, 2 * pause)
        return pause

    def reset(self) -> None:
        """The daemon was well for a while."""
        self._next_s = self._min_s
