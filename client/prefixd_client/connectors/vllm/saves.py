"""The worker's saves: a thread that copies computed blocks into the cache while the engine goes on.

The scheduler keeps a job's source blocks from being freed, or fences the job before they are reused: then it
is called off if it has not begun to copy, and waited for if it has. A save never raises; what the cache
did not take is a miss later.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefixd_client.leases import WriteLease
from prefixd_client.namespace import NamespaceSpec
from prefixd_client.operations import Call
from prefixd_client.values import Committed, ReserveOutcome

from .jobs import SaveJob
from .kv_copies import KvCopies
from .tallies import Tallies

_LOG = logging.getLogger(__name__)


class Reserves(Protocol):
    """What saves need of the client's namespace."""

    def reserve(
        self,
        hashes: Sequence[bytes],
        *,
        parent_hash: bytes = b"",
        shard: int = 0,
        recompute_cost_s: float | None = None,
    ) -> WriteLease | None:
        """Slots for a run; None when the daemon is away."""
        ...


@dataclass(frozen=True, slots=True)
class SaveWay:
    """How a save reaches the daemon.

    namespace_of opens the namespace that a job names; run sends a Commit; patience_s is how long one job
    retries while the daemon makes room.
    """

    namespace_of: Callable[[NamespaceSpec], Reserves]
    run: Callable[[Call[Committed]], Committed]
    patience_s: float


@dataclass
class _Save:
    """A job on its way. The flags change under the Saves' lock."""

    job: SaveJob
    mark: int
    called_off: threading.Event = field(default_factory=threading.Event)
    source_free: threading.Event = field(default_factory=threading.Event)
    copying: bool = False


@dataclass
class SaveResults:
    """sent: held requests whose saves are over. counts: leading kept blocks per job."""

    sent: set[str] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)


class Saves:
    """Saves of one worker, in order, on one thread.

    Args:
        copies: out of its KV cache; closed with the saves.
        way: to the daemon.
        shard: its shard.
        writes: False where another rank writes this shard: jobs are over at once.
        tallies: counts bytes and seconds.
    """

    def __init__(self, copies: KvCopies, way: SaveWay, shard: int, *, writes: bool, tallies: Tallies) -> None:
        self._copies = copies
        self._shard = shard
        self._writes = writes
        self._way = way
        self._tallies = tallies
        self._lock = threading.Lock()
        self._open: dict[int, _Save] = {}
        self._open_of_request: dict[str, int] = {}
        self._held: set[str] = set()
        self._counts: dict[int, int] = {}
        self._queue: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="prefixd-save", daemon=True)
        self._thread.start()

    def start(self, job: SaveJob) -> None:
        """Queues a job; its source blocks are computed and must not change until it is over or fenced."""
        if not self._writes:
            with self._lock:
                self._counts[job.job_id] = len(job.block_ids)
            return
        save = _Save(job, self._copies.mark())
        with self._lock:
            self._open[job.job_id] = save
            self._open_of_request[job.request_id] = self._open_of_request.get(job.request_id, 0) + 1
        self._queue.put(save)

    def fence(self, job_ids: Iterable[int]) -> None:
        """Returns when none of these jobs reads its source blocks any more, or ever will."""
        waited_for = []
        with self._lock:
            for job_id in job_ids:
                save = self._open.get(job_id)
                if save is not None:
                    save.called_off.set()
                    if save.copying:
                        waited_for.append(save)
        for save in waited_for:
            save.source_free.wait()

    def hold(self, request_ids: Iterable[str]) -> None:
        """These requests are finished; take() tells when their saves are over."""
        with self._lock:
            self._held.update(request_ids)

    def take(self) -> SaveResults:
        """What ended since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
            sent = {request_id for request_id in self._held if request_id not in self._open_of_request}
            self._held -= sent
        return SaveResults(sent, counts)

    def close(self) -> None:
        """Calls off what waits, and returns when the thread has ended."""
        with self._lock:
            for save in self._open.values():
                save.called_off.set()
        self._queue.put(None)
        self._thread.join()
        self._copies.close()

    # -- the thread ---------------------------------------------------------------------------------

    def _loop(self) -> None:
        while (save := self._queue.get()) is not None:
            begin, kept = time.monotonic(), 0
            try:
                kept = self._save(save)
            except Exception:  # the thread's outermost seam: without it the engine's blocks stay held
                _LOG.exception("prefixd: save of %s failed", save.job.request_id)
            finally:
                self._tallies.add(save_seconds=time.monotonic() - begin)
                self._over(save, kept)

    def _over(self, save: _Save, kept: int) -> None:
        request_id = save.job.request_id
        with self._lock:
            save.copying = False
            del self._open[save.job.job_id]
            self._counts[save.job.job_id] = kept
            self._open_of_request[request_id] -= 1
            if not self._open_of_request[request_id]:
                del self._open_of_request[request_id]
        save.source_free.set()

    def _save(self, save: _Save) -> int:
        """Leading blocks of the job that are kept. Tries again while the daemon makes room."""
        job, kept = save.job, 0
        self._copies.begin(save.mark)
        namespace = self._way.namespace_of(job.namespace)
        until = time.monotonic() + self._way.patience_s
        while kept < len(job.hashes) and not save.called_off.is_set() and not self._copies.is_lost:
            lease = namespace.reserve(
                job.hashes[kept:],
                parent_hash=job.hashes[kept - 1] if kept else job.parent_hash,
                shard=self._shard,
                recompute_cost_s=job.recompute_cost_s,
            )
            if lease is None:
                break
            with lease:
                kept += self._store(save, lease, kept)
            pause_s = lease.retry_after_s
            if kept == len(job.hashes) or pause_s is None or time.monotonic() + pause_s > until:
                break
            save.called_off.wait(pause_s)
        return kept

    def _store(self, save: _Save, lease: WriteLease, offset: int) -> int:
        """Copies the reserved blocks of a lease in parts; returns the leading blocks of it that are kept."""
        part = self._copies.part_count
        dropped_from = len(lease.outcomes)
        for first in range(0, len(lease.reserved_indexes), part):
            indexes = lease.reserved_indexes[first : first + part]
            with self._lock:
                if save.called_off.is_set():
                    return indexes[0]
                save.copying = True
                save.source_free.clear()
            sources = [save.job.block_ids[offset + index] for index in indexes]
            commit = self._copies.copy_in(lease, indexes, sources)
            with self._lock:
                save.copying = False
            save.source_free.set()
            if commit is None:
                return indexes[0]
            committed = lease.settle(self._way.run(commit))
            self._tallies.add(saved_bytes=(len(indexes) - committed.dropped) * self._copies.block_bytes)
            if committed.dropped:
                dropped_from = indexes[len(indexes) - committed.dropped]
                break
        declined = (
            index for index, outcome in enumerate(lease.outcomes) if outcome is ReserveOutcome.DECLINED
        )
        return min(dropped_from, next(declined, len(lease.outcomes)))
