"""The scheduler's book of saves under way: which job reads which of the engine's blocks.

A block that is being saved must not be overwritten before the save is over. Blocks of a finished request
are held (vLLM frees them when the workers report); blocks that a preempted request gave away are fenced:
the step that reuses them waits for the save, or calls it off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .jobs import LoadJob, SaveJob


@dataclass(slots=True)
class _Open:
    request_id: str
    blocks: frozenset[int]
    workers_left: int
    saved: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A save that every worker has finished; saved leading blocks of the job are kept, the others dropped."""

    request_id: str
    saved: int
    dropped: int


@dataclass
class SaveBook:
    """Open save jobs.

    Args:
        worker_count: workers that report each job.
    """

    worker_count: int
    _open: dict[int, _Open] = field(default_factory=dict)

    def opened(self, job: SaveJob) -> None:
        """A job goes to the workers with this step."""
        self._open[job.job_id] = _Open(
            job.request_id, frozenset(job.block_ids), self.worker_count, len(job.block_ids)
        )

    def reported(self, job_id: int, workers: int, saved: int) -> Saved | None:
        """Some workers have finished a job; its outcome when they were the last."""
        job = self._open.get(job_id)
        if job is None:
            return None
        job.workers_left -= workers
        job.saved = min(job.saved, saved)
        if job.workers_left > 0:
            return None
        del self._open[job_id]
        return Saved(job.request_id, job.saved, len(job.blocks) - job.saved)

    def is_saving(self, request_id: str) -> bool:
        """Whether a job of this request is open."""
        return any(job.request_id == request_id for job in self._open.values())

    def fences(self, given_away: Iterable[int]) -> frozenset[int]:
        """Open jobs that read any of these blocks."""
        given = frozenset(given_away)
        if not given:
            return given
        return frozenset(job_id for job_id, job in self._open.items() if not given.isdisjoint(job.blocks))

    def __len__(self) -> int:
        return len(self._open)


def given_away(output: Any, loads: Sequence[LoadJob], block_tokens: int) -> list[int]:
    """Blocks that a step lets somebody write: newly allocated ones, and targets of loads.

    Args:
        output: vLLM's SchedulerOutput.
        loads: the step's.
        block_tokens: tokens per block.
    """
    blocks: list[int] = [block for job in loads for block in job.block_ids]
    for new in output.scheduled_new_reqs:
        blocks.extend(new.block_ids[0][new.num_computed_tokens // block_tokens :])
    cached = output.scheduled_cached_reqs
    for request_id, new_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if new_ids:
            resumed = request_id in cached.resumed_req_ids
            blocks.extend(new_ids[0][computed // block_tokens if resumed else 0 :])
    return blocks
