"""An event loop whose time jumps to the next timer when nothing is left to do: hours pass in milliseconds.

What really happens outside (a pipe, a thread) takes no virtual time: while
`outside` says that something is awaited from there, the loop waits for it really.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
OUTSIDE_S_MAX = 30.0
"""Real seconds without a sign from outside; a test that needs it has failed."""


class _JumpingSelector(selectors.DefaultSelector):
    """Selects without waiting, and moves the loop's time instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None or self.loop.outside():
            events = super().select(OUTSIDE_S_MAX)
            assert events, "nothing is scheduled, and nothing comes from outside"
            return events
        self.loop.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module.

    Attributes:
        now: virtual seconds.
        outside: whether something is awaited from outside of the loop.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.outside: Callable[[], bool] = lambda: False
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class LoopClock:
    """The loop's time as the daemon's clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._loop.now


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine on a virtual loop of its own, to its end."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()
