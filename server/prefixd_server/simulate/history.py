"""What every replay shares: blocks by id, the prefix tree, and a policy that is told of each request.

A trace has no hashes to look up: a block's id is its row. Nothing of a reply is
told to the policy before arrival + TTFT + output x TPOT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_SLOT, Rows, StopReason
from prefixd_server.catalog.columns import BlockColumns
from prefixd_server.catalog.tree import PrefixTree
from prefixd_server.policy.importance import Access
from prefixd_server.policy.learning import LearningPolicy
from prefixd_server.policy.policy import Policy
from prefixd_server.policy.signals import NO_GAP, history_byte
from prefixd_server.simulate.arrivals import Pending, ServingModel
from prefixd_server.simulate.baselines.tree import ReplayListener
from prefixd_server.simulate.traces import Trace

SPACE = 0
POOL = 0
SOME_SLOT = 0
"""Stands for a slot: a replay counts copies and has no bytes."""
NEW, AGAIN = history_byte(NO_GAP, reused=False), history_byte(NO_GAP, reused=True)
"""Histories where the policy tells none."""


@dataclass(slots=True)
class Running:
    """A request whose reply has not ended: what the policy made of it, and the nodes that it used last."""

    request: int
    access: Access | None
    nodes: list[int]
    rows: Rows
    used_at: float


@dataclass(slots=True)
class Part:
    """Leading blocks of a run's rest that share a history."""

    ids: Rows
    history: int


class TraceBlocks(BlockColumns):
    """The blocks of a trace: a block has its id for a row, and is in use while it is known."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.block_count)
        for slots in self.slot.values():
            slots[:] = NO_SLOT
        self.known: NDArray[np.bool_] = np.zeros(trace.block_count, dtype=np.bool_)

    def take(self, rows: Rows) -> None:
        """These blocks are known from now on."""
        self.known[rows] = True
        self.count += len(rows)

    def free(self, rows: Rows) -> None:
        """These blocks are forgotten."""
        self.known[rows] = False
        self.count -= len(rows)

    def rows_in_use(self) -> Rows:
        """All known blocks, ascending."""
        return self.in_use(0, len(self.known))

    @property
    def rows_end(self) -> int:
        """Any block of the trace may be known."""
        return len(self.known)

    def in_use(self, first: int, end: int) -> Rows:
        """The known blocks among [first, end), ascending."""
        return np.flatnonzero(self.known[first:end]).astype(np.int32) + np.int32(first)


class ReplayState(ABC):
    """See the module.

    Args:
        seed: of the policy's randomness.
        use_stops: whether replies tell how they ended, as far as the trace knows.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        seed: int,
        serving: ServingModel | None,
        use_stops: bool,
    ) -> None:
        self.trace = trace
        self.policy = policy
        self.columns = TraceBlocks(trace)
        self.tree = PrefixTree(self.columns, trace.block_count)
        self.tree.add_space(SPACE, POOL)
        self.learner = policy if isinstance(policy, LearningPolicy) else None
        self.listener = policy if isinstance(policy, ReplayListener) else None
        self.serving = serving or ServingModel()
        self.use_stops = use_stops
        self.rng = np.random.default_rng(seed)
        self.running: Pending[Running] = Pending()
        self._names = trace.hashes()[:, :1].copy()
        self._starts: list[int] = trace.starts.tolist()
        self._input_tokens: list[int] = trace.input_tokens.tolist()
        self.output_tokens: list[int] = trace.output_tokens.tolist()

    def run(self, progress: Callable[[int], None] | None = None) -> NDArray[np.int64]:
        """Replays everything. Blocks hit by each request, shape (requests,).

        Args:
            progress: told of each request that is done.
        """
        hits = np.zeros(self.trace.request_count, dtype=np.int64)
        for request, now in enumerate(self.trace.arrival_s.tolist()):
            hits[request] = self.request(request, now)
            if progress is not None:
                progress(request)
        return hits

    @abstractmethod
    def request(self, request: int, now: float) -> int:
        """One request arrives. Blocks that it hits."""

    def run_of(self, request: int) -> Rows:
        """The blocks of a request, from its first on."""
        return self.trace.ids[self._starts[request] : self._starts[request + 1]]

    def known_count(self, run: Rows) -> int:
        """Leading blocks of the run that are known."""
        known = self.columns.known.take(run)
        if len(known) == 0 or known[-1]:
            return len(known)
        return int(known.argmin())

    def learn(self, run: Rows, path: list[int], hit: int, now: float) -> Access | None:
        """Tells the policy of the request, and classifies the nodes of its path."""
        if self.learner is None:
            return None
        idle, fanout = 0.0, 0
        if hit:
            last = path[-1]
            idle = now - self.tree.nodes.mv.last_use[last]
            fanout = self.tree.nodes.mv.child_count[last] + (hit < len(run))
        names = self._names.take(run, axis=0)
        access = self.learner.on_access(names, hit, idle, fanout, now)
        self.tree.nodes.classify(path, access.history_again)
        return access

    def rest(self, run: Rows, hit: int, access: Access | None) -> list[Part]:
        """What was missed: first what was used before, then what is new."""
        again, new, known = AGAIN, NEW, hit
        if access is not None:
            again, new, known = access.history_again, access.history_new, max(access.returned_count, hit)
        elif self.listener is not None:
            known += self.listener.missed(run[hit:])
        parts = (Part(run[hit:known], again), Part(run[known:], new))
        return [part for part in parts if len(part.ids)]

    def add(self, part: Part, parent: int, now: float) -> list[int]:
        """Makes the part's blocks known below `parent`; the caller adds copies. Their nodes."""
        self.columns.take(part.ids)
        nodes = self.tree.add(SPACE, parent, part.ids, now)
        self.tree.nodes.classify(nodes, part.history)
        if part.history & 1:
            self.tree.nodes.mark_returned(nodes)
        return nodes

    def tell_end(self, ended: Running) -> None:
        """The reply has ended: the policy learns how, and nodes not used since change class."""
        if self.learner is None or ended.access is None:
            return
        stop = self.trace.stops[ended.request] if self.use_stops else StopReason.UNKNOWN
        reply = self.learner.on_finish(ended.access, self.output_tokens[ended.request], stop)
        self.tree.nodes.end_reply(ended.nodes, ended.used_at, reply)

    def missed_tokens(self, request: int, hit: int) -> float:
        """Input tokens that have to be computed."""
        return max(0.0, float(self._input_tokens[request] - hit * self.trace.block_tokens))
