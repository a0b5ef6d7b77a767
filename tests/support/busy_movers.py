"""Movers that are busy until the test lets them go on: what they are given meanwhile waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixd_server.base.config import MoverConfig
from prefixd_server.media.movers import CallJob, Movers

JOB_COUNT = 32
"""More than a pool has threads, and far fewer than may wait."""
JOB_COUNT_MAX = MoverConfig().thread_count + MoverConfig().queue_limit
"""The default pool takes no more than these."""


@asynccontextmanager
async def busy(movers: Movers, job_count: int = JOB_COUNT) -> AsyncIterator[None]:
    """Every mover is at work until the end; nothing of it has to do with the node."""
    gate = threading.Event()
    jobs = [asyncio.ensure_future(movers.run(CallJob(gate.wait))) for _ in range(job_count)]
    await asyncio.sleep(0)
    assert movers.depth == job_count
    try:
        yield
    finally:
        gate.set()
        await asyncio.gather(*jobs)
