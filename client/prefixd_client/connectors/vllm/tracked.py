"""What the scheduler's side remembers of one request."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from prefixd_client.namespace import NamespaceSpec
from prefixd_client.values import Tier

from .asking import Lease, Question
from .usage import Life


class Phase(enum.Enum):
    """Where a request stands with the cache.

    IDLE --ask--> ASKED --answer--> FOUND | MISSED
    FOUND --blocks allocated--> LOADING --workers report--> IDLE (and asks no more until preempted)
    """

    IDLE = "not asked yet"
    ASKED = "a question is on its way"
    FOUND = "a lease is held"
    MISSED = "nothing beyond the engine's own blocks"
    LOADING = "workers copy"


@dataclass(slots=True)
class Tracked:
    """One request of the engine, from its arrival until it is finished.

    namespace is None while it is not known (an adapter is being read) and where nothing may be shared.
    skip_blocks: the engine's own blocks when the question was put; own_blocks: when it was last answered.
    saved_blocks: leading blocks that are kept in the cache or given to a save job.
    has_unkept: the cache did not keep the tail of a save: the last save starts from the root again.
    quiet_below: a step in which the request has computed fewer tokens than this has nothing new to look at.
    """

    request: Any
    namespace: NamespaceSpec | None
    life: Life
    phase: Phase = Phase.IDLE
    question: Question | None = None
    lease: Lease | None = None
    skip_blocks: int = 0
    own_blocks: int = 0
    load_job_id: int = -1
    load_blocks: tuple[int, ...] = ()
    load_sources: dict[Tier, int] = field(default_factory=dict)
    barred: bool = False
    """A load failed: asking again would find the same blocks and loop for ever."""
    retired: bool = False
    """Its KV mixes old and new weights: nothing of it is saved."""
    saved_blocks: int = 0
    has_unkept: bool = False
    quiet_below: int = 0
    adapter_check: Future[bool] | None = None

    @property
    def request_id(self) -> str:
        """The engine's id."""
        return str(self.request.request_id)

    def is_waiting(self) -> bool:
        """Whether an answer or a load is under way."""
        return self.phase in (Phase.ASKED, Phase.LOADING)

    def rest(self, block_tokens: int) -> None:
        """Was looked at in a step: there is nothing new before its prompt or its next block is whole."""
        if self.namespace is not None:
            next_end = (self.saved_blocks + 1) * block_tokens
            is_prefilling = self.life.prefilled_at is None
            self.quiet_below = min(next_end, self.request.num_prompt_tokens) if is_prefilling else next_end

    def drop_lease(self) -> None:
        """Gives back what is held or asked for; a load under way keeps its lease for the workers."""
        if self.question is not None:
            self.question.abandon()
            self.question = None
        if self.lease is not None and self.phase is not Phase.LOADING:
            self.lease.release()
            self.lease = None
        if self.phase is not Phase.LOADING:
            self.phase = Phase.IDLE

    def load_ended(self) -> Lease | None:
        """Workers have copied, or failed to, and released their part; returns what is ours to release."""
        lease, self.lease = self.lease, None
        self.load_job_id = -1
        self.load_blocks = ()
        self.phase = Phase.IDLE
        return lease
