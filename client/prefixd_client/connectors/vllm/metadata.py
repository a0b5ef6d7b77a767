"""What the connector's two sides tell each other, once per step: jobs down, outcomes up.

All of it is pickled by vLLM between processes, so these are plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from .identity import WorkerFacts
from .jobs import LoadJob, SaveJob


@dataclass
class StepJobs(KVConnectorMetadata):
    """Scheduler to workers, with every step.

    fences: saves whose source blocks this step gives away; they must be over, or never read again, before
    the step touches memory. held_requests: finished requests whose blocks wait for their saves. is_waiting:
    the step computes nothing, and requests wait for the cache.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    fences: frozenset[int] = frozenset()
    held_requests: frozenset[str] = frozenset()
    is_waiting: bool = False


@dataclass
class StepOutcomes(KVConnectorWorkerMetadata):
    """Workers to scheduler. Several workers' outcomes of one step add up.

    loaded and saved: per job (workers that finished it, fewest leading blocks any of them got right).
    load_seconds: per job, of its slowest worker.
    """

    loaded: dict[int, tuple[int, int]] = field(default_factory=dict)
    saved: dict[int, tuple[int, int]] = field(default_factory=dict)
    load_seconds: dict[int, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepOutcomes:
        """Both together."""
        assert isinstance(other, StepOutcomes)
        seconds = dict(self.load_seconds)
        for job_id, passed in other.load_seconds.items():
            seconds[job_id] = max(passed, seconds.get(job_id, 0.0))
        return StepOutcomes(_added(self.loaded, other.loaded), _added(self.saved, other.saved), seconds)

    def __bool__(self) -> bool:
        """Whether there is anything to tell; vLLM drops what is empty."""
        return bool(self.loaded or self.saved)


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """One worker to the scheduler, once at start. device_uuid: of its GPU, empty on CPUs."""

    facts: WorkerFacts
    device_uuid: str = ""


def _added(left: dict[int, tuple[int, int]], right: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    merged = dict(left)
    for job_id, (workers, blocks) in right.items():
        known_workers, known_blocks = merged.get(job_id, (0, blocks))
        merged[job_id] = (known_workers + workers, min(known_blocks, blocks))
    return merged
