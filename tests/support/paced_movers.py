"""Movers on virtual time, without threads: each job is done at once, after a wait that a seed chooses."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from prefixd_server.base.errors import Unavailable
from prefixd_server.media.movers import Job, Movers

R = TypeVar("R")
WAIT_S_MAX = 0.02


class PacedMovers(Movers):
    """Same interface as Movers; several jobs overlap, and end in any order."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(thread_count=0, queue_limit=256)
        self._rng = rng
        self._under_way: set[asyncio.Task[Any]] = set()

    async def run(self, job: Job[R]) -> R:
        """See Movers."""
        if self._closed:
            raise Unavailable("MOVERS_CLOSED", "closed")
        task = asyncio.ensure_future(self._perform(job))
        self._under_way.add(task)
        task.add_done_callback(self._done)
        return cast(R, await asyncio.shield(task))

    async def drain(self) -> None:
        """See Movers."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _perform(self, job: Job[R]) -> R:
        await asyncio.sleep(self._rng.uniform(0, WAIT_S_MAX))
        return job.perform()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        task.exception()  # nobody may be left who waits


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given before it returns: give it to a loop that is to replay."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Executor."""
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done
