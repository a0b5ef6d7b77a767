"""Asks the daemon on threads of its own, so that the engine's scheduler never waits for an RPC.

A Question is put once and looked at every step until its answer is there. An answer that nobody wants any
more (the request was aborted) gives its lease back by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from prefixd_client.namespace import NamespaceSpec
from prefixd_client.values import RunHits, Tier

_LOG = logging.getLogger(__name__)
THREAD_COUNT = 16
"""Questions that wait for blocks from NVMe at a time, while others are answered."""


class Lease(Protocol):
    """What the scheduler needs of the client's ReadLease."""

    @property
    def token(self) -> bytes:
        """What workers redeem."""
        ...

    @property
    def hit_count(self) -> int:
        """Leading blocks of the run that are kept, skipped ones included."""
        ...

    @property
    def run(self) -> RunHits:
        """Hits by tier, in run order."""
        ...

    def expired(self) -> bool:
        """Whether it is too late to use it."""
        ...

    def release(self) -> None:
        """Gives it back, off the critical path."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """namespace is None where the request's adapter cannot be told apart: nothing is loaded or saved."""

    namespace: NamespaceSpec | None
    lease: Lease | None


Resolve = Callable[[], NamespaceSpec | None]
Acquire = Callable[[NamespaceSpec, Sequence[bytes], int, str, float], Lease | None]
"""(namespace, hashes, blocks to skip, request id, seconds to wait for what comes from NVMe) to a lease, or
None where nothing beyond is kept."""


class Question:
    """One question on its way. `skip_blocks` is the engine's own hit that it was put with."""

    def __init__(self, skip_blocks: int) -> None:
        self.skip_blocks = skip_blocks
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._unwanted = False

    @property
    def answer(self) -> Answer | None:
        """The answer, None while there is none."""
        return self._answer

    def abandon(self) -> None:
        """Nobody wants the answer: its lease goes back, now or when it comes."""
        with self._lock:
            self._unwanted = True
            answer = self._answer
        if answer is not None and answer.lease is not None:
            answer.lease.release()

    def put_answer(self, answer: Answer) -> None:
        """Called by the asking thread, once."""
        with self._lock:
            self._answer = answer
            unwanted = self._unwanted
        if unwanted and answer.lease is not None:
            answer.lease.release()


class Asking:
    """Puts questions in the background.

    Args:
        acquire: the client's call; bounded by its own deadline.
        now: seconds of a monotonic clock.
    """

    def __init__(self, acquire: Acquire, now: Callable[[], float] = time.monotonic) -> None:
        self._acquire = acquire
        self._now = now
        self._threads = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="prefixd-ask")

    def ask(
        self,
        resolve: Resolve,
        hashes: Sequence[bytes],
        skip_blocks: int,
        request_id: str,
        wait_s: float = 0.0,
    ) -> Question:
        """What of this run is kept beyond the engine's own blocks?

        Args:
            resolve: finds the namespace; may read files.
            hashes: of the run from its root; no longer than skip_blocks asks for the namespace only.
            skip_blocks: blocks that the engine has itself.
            wait_s: how long from now to wait for kept blocks that are not readable yet.
        """
        question = Question(skip_blocks)
        self._threads.submit(self._run, question, resolve, hashes, request_id, self._now() + wait_s)
        return question

    def check(self, test: Callable[[], bool]) -> Future[bool]:
        """Runs a test that may read files."""
        return self._threads.submit(test)

    def run(self, task: Callable[[], None]) -> None:
        """Runs what nobody waits for."""
        self._threads.submit(self._run_task, task)

    def close(self) -> None:
        """Ends the threads; answers under way still arrive."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_task(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # the outermost seam: nobody looks at the future
            _LOG.exception("prefixd: a background task failed")

    def _run(
        self,
        question: Question,
        resolve: Resolve,
        hashes: Sequence[bytes],
        request_id: str,
        wait_until: float,
    ) -> None:
        answer = Answer(None, None)
        try:
            namespace = resolve()
            answer = Answer(namespace, None)
            if namespace is not None and len(hashes) > question.skip_blocks:
                wait_s = max(0.0, wait_until - self._now())
                lease = self._acquire(namespace, hashes, question.skip_blocks, request_id, wait_s)
                answer = Answer(namespace, lease)
        except Exception:  # the outermost seam: the request waits for an answer, whatever it is
            _LOG.exception("prefixd: asking failed, the request is computed")
        finally:
            question.put_answer(answer)


def hits_beyond(hits: Sequence[tuple[Tier, int]], skip_blocks: int, block_count: int) -> dict[Tier, int]:
    """Blocks per tier among `block_count` blocks behind the first `skip_blocks`."""
    found: dict[Tier, int] = {}
    position, end = 0, skip_blocks + block_count
    for tier, count in hits:
        used = min(position + count, end) - max(position, skip_blocks)
        if used > 0:
            found[tier] = found.get(tier, 0) + used
        position += count
    return found
