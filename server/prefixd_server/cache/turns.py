"""Long work on the loop, in turns: a generator that yields wherever others may have theirs.

What it does between two yields is one step; after each it takes the state anew. What it yields is ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Turns: TypeAlias = Generator[Any, None, T]


def at_once(work: Callable[P, Turns[T]]) -> Callable[P, T]:
    """The same as one step."""

    @wraps(work)
    def whole(*args: P.args, **more: P.kwargs) -> T:
        turns = work(*args, **more)
        while True:
            try:
                next(turns)
            except StopIteration as done:
                result: T = done.value
                return result

    return whole


def in_turns(work: Callable[P, Turns[T]], pause_s: float = 0.0) -> Callable[P, Coroutine[Any, Any, T]]:
    """The same with others' turns between its own. Cancelled, the generator is ended where it stands.

    Args:
        pause_s: after each turn, for work that nobody is in a hurry for: a call takes several turns of
            the loop, and would wait for as many of the work's.
    """

    @wraps(work)
    async def one_by_one(*args: P.args, **more: P.kwargs) -> T:
        turns = work(*args, **more)
        try:
            while True:
                try:
                    next(turns)
                except StopIteration as done:
                    result: T = done.value
                    return result
                await asyncio.sleep(pause_s)
        finally:
            turns.close()

    return one_by_one
