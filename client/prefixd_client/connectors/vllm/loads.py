"""The worker's loads: redeem a lease, copy its blocks into the KV cache, verify them there.

Between steps a thread does it and the engine goes on; in a step the worker waits for it. A load never
raises: what could not be loaded is reported, and the engine computes it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from prefixd_client.leases import ReadLease
from prefixd_client.namespace import NamespaceSpec

from .jobs import LoadJob
from .kv_copies import KvCopies
from .tallies import Tallies

_LOG = logging.getLogger(__name__)


class Redeems(Protocol):
    """What loads need of the client's namespace."""

    def redeem(self, token: bytes, shard: int) -> ReadLease | None:
        """One shard of a lease; None when it is over or the daemon is away."""
        ...


@dataclass
class LoadResults:
    """Loads that ended since the last look. done: (request, all of its loads between steps) and bad: blocks
    of the KV cache that hold nothing usable. counts: leading good blocks per job; seconds: what it took."""

    done: set[str] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)


class Loads:
    """Loads of one worker.

    Args:
        copies: into its KV cache; closed with the loads.
        shard: its shard.
        namespace_of: opens the namespace that a job names.
        tallies: counts blocks, bytes and seconds.
    """

    def __init__(
        self,
        copies: KvCopies,
        shard: int,
        namespace_of: Callable[[NamespaceSpec], Redeems],
        tallies: Tallies,
    ) -> None:
        self._copies = copies
        self._shard = shard
        self._namespace_of = namespace_of
        self._tallies = tallies
        self._lock = threading.Lock()
        self._results = LoadResults()
        self._has_ended = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefixd-load")

    def start(self, job: LoadJob) -> None:
        """Loads between steps, or now when the job says so."""
        mark = self._copies.mark()
        if job.in_step:
            self._run(job, mark)
        else:
            self._thread.submit(self._run, job, mark)

    def take(self) -> LoadResults:
        """What ended since the last call."""
        with self._lock:
            results, self._results = self._results, LoadResults()
            self._has_ended.clear()
        return results

    def wait(self, timeout_s: float) -> None:
        """Returns when there is something to take, after timeout_s at the latest."""
        self._has_ended.wait(timeout_s)

    def close(self) -> None:
        """Waits for the load under way; the others are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._copies.close()

    def _run(self, job: LoadJob, mark: int) -> None:
        begin, good = time.monotonic(), 0
        try:
            self._copies.begin(mark)
            good = self._copy(job)
        except Exception:  # the outermost seam: the engine waits for the outcome, whatever it is
            _LOG.exception("prefixd: load of %s failed, its blocks are computed", job.request_id)
        finally:
            seconds = time.monotonic() - begin
            self._tallies.add(
                loaded_blocks=good,
                loaded_bytes=good * self._copies.block_bytes,
                unloaded_blocks=len(job.block_ids) - good,
                load_seconds=seconds,
            )
            with self._lock:
                self._results.counts[job.job_id] = good
                self._results.seconds[job.job_id] = seconds
                self._results.bad.update(job.block_ids[good:])
                if not job.in_step:
                    self._results.done.add(job.request_id)
                self._has_ended.set()

    def _copy(self, job: LoadJob) -> int:
        """Leading blocks that came out right."""
        lease = self._namespace_of(job.namespace).redeem(job.token, self._shard)
        if lease is None:
            return 0
        with lease:
            return self._copies.load(lease, self._shard, job.start, job.block_ids)
