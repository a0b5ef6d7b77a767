"""Asks the daemon on threads of its own, so that the engine's scheduler never waits for an RPC.

A Question is put once and looked at every step until its answer is there. An answer that nobody wants any
more (the request was aborted) gives its lease back by itself.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from prefixd_client.namespace import NamespaceSpec
from prefixd_client.values import RunHits, Tier, UsageReport

_LOG = logging.getLogger(__name__)
ASKING_THREAD_COUNT = 4
"""One may hang until its deadline while others answer; few, so that their own number delays nobody."""
WAITING_THREAD_COUNT = 16
"""Requests that wait for blocks from NVMe at a time; the others wait for a place, and no longer in all."""


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


class Cache(Protocol):
    """The scheduler's calls to the daemon. Any thread; a daemon that is away has nothing."""

    def acquire(
        self, spec: NamespaceSpec, hashes: Sequence[bytes], skip_blocks: int, request_id: str, wait_s: float
    ) -> Lease | None:
        """A lease on the leading blocks that can be read, None where there are none beyond the skipped.

        Waits up to wait_s for kept blocks that cannot be read yet.
        """
        ...

    def stored_count(self, spec: NamespaceSpec, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are kept in any tier."""
        ...

    def report_usage(self, spec: NamespaceSpec, report: UsageReport) -> None:
        """Tells a step of a request's life."""
        ...


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

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody wants the answer."""
        return self._unwanted

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
        cache: the daemon's; each call is bounded by its own deadline.
        now: seconds of a monotonic clock.
    """

    def __init__(self, cache: Cache, now: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._now = now
        self._threads = ThreadPoolExecutor(ASKING_THREAD_COUNT, thread_name_prefix="prefixd-ask")
        self._waiting = ThreadPoolExecutor(WAITING_THREAD_COUNT, thread_name_prefix="prefixd-wait")
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_run_tasks, args=(self._tasks,), name="prefixd-tell", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

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
            request_id: the engine's.
            wait_s: how long from now to wait for kept blocks that cannot be read yet.
        """
        question = Question(skip_blocks)
        until = self._now() + wait_s
        self._threads.submit(self._run, question, resolve, hashes, request_id, until)
        return question

    def check(self, test: Callable[[], bool]) -> Future[bool]:
        """Runs a test that may read files."""
        return self._threads.submit(test)

    def run(self, task: Callable[[], None]) -> None:
        """Runs what nobody waits for, in the order given. Costs the caller less than a thread pool would."""
        self._tasks.put(task)

    def close(self) -> None:
        """Ends the threads; answers under way still arrive."""
        for threads in (self._threads, self._waiting):
            threads.shutdown(wait=False, cancel_futures=True)
        self._tasks.put(None)

    # -- on the threads -----------------------------------------------------------------------------

    def _run(
        self, question: Question, resolve: Resolve, hashes: Sequence[bytes], request_id: str, until: float
    ) -> None:
        answer = Answer(None, None)
        try:
            namespace = resolve()
            answer = Answer(namespace, None)
            if namespace is not None and len(hashes) > question.skip_blocks:
                lease = self._cache.acquire(namespace, hashes, question.skip_blocks, request_id, 0.0)
                answer = Answer(namespace, lease)
                if self._more_is_coming(answer, hashes, question.skip_blocks, until):
                    self._waiting.submit(self._wait, question, answer, hashes, request_id, until)
                    return
        except Exception:  # the outermost seam: the request waits for an answer, whatever it is
            _LOG.exception("prefixd: asking failed, the request is computed")
        question.put_answer(answer)

    def _more_is_coming(
        self, answer: Answer, hashes: Sequence[bytes], skip_blocks: int, until: float
    ) -> bool:
        """Whether more of the run is kept than can be read now, and there is time to wait for it."""
        lease, namespace = answer.lease, answer.namespace
        if namespace is None or self._now() >= until or (lease is not None and not lease.run.pending_count):
            return False
        readable = skip_blocks if lease is None else lease.hit_count
        return self._cache.stored_count(namespace, hashes) > readable

    def _wait(
        self, question: Question, first: Answer, hashes: Sequence[bytes], request_id: str, until: float
    ) -> None:
        """Asks again, with time; what was found first stays held meanwhile, and is the answer without it."""
        answer = first
        try:
            remaining_s = until - self._now()
            if first.namespace is not None and remaining_s > 0 and not question.is_abandoned:
                lease = self._cache.acquire(
                    first.namespace, hashes, question.skip_blocks, request_id, remaining_s
                )
                if lease is not None:
                    answer = Answer(first.namespace, lease)
                    if first.lease is not None:
                        first.lease.release()
        except Exception:  # the outermost seam, as above
            _LOG.exception("prefixd: waiting failed, the request takes what there was")
        question.put_answer(answer)


def _run_tasks(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """The thread that tells, until it gets None; it holds nothing that would keep an Asking alive."""
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:  # the outermost seam: nobody hears of it
            _LOG.exception("prefixd: a background task failed")
        del task


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
