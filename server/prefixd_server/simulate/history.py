"""What every replay shares: blocks by id, the prefix tree, and a policy that is told of each request.

Rows are found by block id, since a trace has no hashes to look up. Nothing of
a reply is told to the policy before arrival + TTFT + output x TPOT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_ROW, NO_SLOT, Rows, StopReason
from prefixd_server.base.views import Nodes
from prefixd_server.catalog.columns import BlockColumns
from prefixd_server.catalog.tree import PrefixTree
from prefixd_server.policy.importance import Access
from prefixd_server.policy.learning import LearningPolicy
from prefixd_server.policy.policy import Policy
from prefixd_server.policy.signals import NO_GAP, RUNNING, history_byte
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
    nodes: Nodes
    rows: Rows
    used_at: float


@dataclass(slots=True)
class Part:
    """Leading blocks of a run's rest that share a history."""

    ids: NDArray[np.int32]
    history: int


class ReplayState(ABC):
    """See the module.

    Args:
        block_count_max: blocks that can be known at once.
        seed: of the policy's randomness.
        use_stops: whether replies tell how they ended, as far as the trace knows.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        block_count_max: int,
        seed: int,
        serving: ServingModel | None,
        use_stops: bool,
    ) -> None:
        self.trace = trace
        self.policy = policy
        self.columns = BlockColumns(block_count_max)
        for slots in self.columns.slot.values():
            slots[:] = NO_SLOT
        self.tree = PrefixTree(self.columns, block_count_max)
        self.tree.add_space(SPACE, POOL)
        self.learner = policy if isinstance(policy, LearningPolicy) else None
        self.listener = policy if isinstance(policy, ReplayListener) else None
        self.serving = serving or ServingModel()
        self.use_stops = use_stops
        self.rng = np.random.default_rng(seed)
        self.running: Pending[Running] = Pending()
        self._hashes = trace.hashes()
        self.row_of: Rows = np.full(trace.block_count, NO_ROW, dtype=np.int32)
        self.id_of: NDArray[np.int32] = np.zeros(block_count_max, dtype=np.int32)

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

    def known_rows(self, run: NDArray[np.int32]) -> Rows:
        """Rows of the run's leading blocks that are known."""
        rows = self.row_of.take(run)
        if len(rows) == 0 or rows[-1] >= 0:
            return rows
        return rows[: int((rows < 0).argmax())]

    def learn(self, run: NDArray[np.int32], path: Nodes, hit: int, now: float) -> Access | None:
        """Tells the policy of the request, and classifies the nodes of its path."""
        if self.learner is None:
            return None
        idle, fanout = 0.0, 0
        if hit:
            last = int(path[-1])
            idle = now - self.tree.nodes.mv.last_use[last]
            fanout = self.tree.nodes.mv.child_count[last] + (hit < len(run))
        hashes = self._hashes.take(run, axis=0)
        access = self.learner.on_access(hashes, hit, idle, fanout, now, self.rng)
        self.tree.nodes.gap_class[path] = access.history_again
        self.tree.nodes.output_class[path] = RUNNING
        return access

    def rest(self, run: NDArray[np.int32], hit: int, access: Access | None) -> list[Part]:
        """What was missed: first what was used before, then what is new."""
        again, new, known = AGAIN, NEW, hit
        if access is not None:
            again, new, known = access.history_again, access.history_new, max(access.returned_count, hit)
        elif self.listener is not None:
            known += self.listener.missed(run[hit:])
        parts = (Part(run[hit:known], again), Part(run[known:], new))
        return [part for part in parts if len(part.ids)]

    def add(self, part: Part, parent: int, now: float) -> tuple[Rows, Nodes]:
        """Makes the part's blocks known below `parent`; the caller adds copies. Their rows and nodes."""
        rows = self.columns.allocate(len(part.ids))
        self.row_of[part.ids] = rows
        self.id_of[rows] = part.ids
        self.tree.add(SPACE, parent, rows, now)
        nodes = self.tree.nodes_of(rows)
        self.tree.nodes.gap_class[nodes] = part.history
        if part.history & 1:
            # They were used before they were evicted; what follows must not be appended to them.
            self.tree.nodes.reused[nodes] = 1
            self.tree.nodes.use_count[nodes] = 2
        return rows, nodes

    def tell_end(self, ended: Running) -> None:
        """The reply has ended: the policy learns how, and nodes not used since change class."""
        if self.learner is None or ended.access is None:
            return
        stop = self.trace.stops[ended.request] if self.use_stops else StopReason.UNKNOWN
        output = int(self.trace.output_tokens[ended.request])
        reply = self.learner.on_finish(ended.access, output, stop)
        unused_since = ended.nodes[self.tree.nodes.last_use.take(ended.nodes) == ended.used_at]
        self.tree.nodes.output_class[unused_since] = reply

    def missed_tokens(self, request: int, hit: int) -> float:
        """Input tokens that have to be computed."""
        return max(0.0, float(self.trace.input_tokens[request]) - hit * self.trace.block_tokens)
