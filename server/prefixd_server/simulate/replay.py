"""Replays a trace against one tier of a given size: the catalog's tree and a policy, on the trace's clock.

Hits are judged when a request arrives, cold start included. A request's own
chain is pinned only at that instant. A block is known exactly as long as it has
its copy; rows are found by block id, since a trace has no hashes to look up.

Not here: several tiers and links (tiers.py), policies outside the tree
(baselines/), the offline optimum (optimum.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_ROW, NO_SLOT, Rows, StopReason, Tier
from prefixd_server.base.views import Nodes
from prefixd_server.catalog.columns import BlockColumns
from prefixd_server.catalog.tree import PrefixTree
from prefixd_server.policy.importance import Access
from prefixd_server.policy.learning import LearningPolicy
from prefixd_server.policy.policy import Policy, Victims
from prefixd_server.policy.signals import NO_GAP, history_byte
from prefixd_server.simulate.arrivals import Pending, ServingModel
from prefixd_server.simulate.baselines.tree import ReplayListener
from prefixd_server.simulate.traces import Trace

_SPACE = 0
_POOL = 0
_SOME_SLOT = 0
NEW, AGAIN = history_byte(NO_GAP, reused=False), history_byte(NO_GAP, reused=True)
"""Histories where the policy tells none."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A request whose reply has not ended: its access, and the nodes that it used last."""

    request: int
    access: Access
    nodes: Nodes
    used_at: float


class Replay:
    """See the module.

    Args:
        capacity_blocks: copies that the tier holds.
        seed: of the policy's randomness.
        use_stops: whether replies tell how they ended, as far as the trace knows.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        capacity_blocks: int,
        seed: int,
        serving: ServingModel | None = None,
        use_stops: bool = True,
    ) -> None:
        self.trace = trace
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.columns = BlockColumns(capacity_blocks + 1)
        self.tree = PrefixTree(self.columns, capacity_blocks + 1)
        self.tree.add_space(_SPACE, _POOL)
        self.view = self.tree.view(Tier.DRAM, _POOL, self._evictable)
        self.evicted_count = 0
        self.stored_count = 0
        self._learner = policy if isinstance(policy, LearningPolicy) else None
        self._listener = policy if isinstance(policy, ReplayListener) else None
        self._serving = serving or ServingModel()
        self._use_stops = use_stops
        self._rng = np.random.default_rng(seed)
        self._hashes = trace.hashes()
        self._row_of: Rows = np.full(trace.block_count, NO_ROW, dtype=np.int32)
        self._id_of: NDArray[np.int32] = np.zeros(capacity_blocks + 1, dtype=np.int32)
        self._pinned: frozenset[int] | set[int] = frozenset()
        self._running: Pending[_Running] = Pending()
        self._slots = self.columns.slot[Tier.DRAM]

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

    def request(self, request: int, now: float) -> int:
        """One request arrives. Blocks that it hits."""
        for ended in self._running.ended(now):
            self._finish(ended)
        run = self.trace.run(request)
        rows = self._row_of.take(run)
        missing = int((rows < 0).argmax()) if len(rows) else 0
        hit = missing if len(rows) and rows[missing] < 0 else len(rows)
        path = self.tree.path_nodes(rows[:hit]) if hit else rows[:0]
        self._pinned = set(path.tolist())
        access = self._learn(run, path, hit, now)
        if hit:
            self.tree.use(path, now)
        nodes = [path, *self._store_rest(run, rows, hit, access, now)]
        if access is not None:
            missed = float(self.trace.input_tokens[request]) - hit * self.trace.block_tokens
            reply = self._serving.reply_s(max(missed, 0.0), float(self.trace.output_tokens[request]))
            used = nodes[0] if len(nodes) == 1 else np.concatenate(nodes)
            self._running.add(now + reply, _Running(request, access, used, now))
        return hit

    def _learn(self, run: NDArray[np.int32], path: Nodes, hit: int, now: float) -> Access | None:
        if self._learner is None:
            return None
        idle, fanout = 0.0, 0
        if hit:
            last = int(path[-1])
            idle = now - self.tree.nodes.mv.last_use[last]
            fanout = self.tree.nodes.mv.child_count[last] + (hit < len(run))
        hashes = self._hashes.take(run, axis=0)
        access = self._learner.on_access(hashes, hit, idle, fanout, now, self._rng)
        self.tree.nodes.gap_class[path] = access.history_again
        self.tree.nodes.output_class[path] = 0
        return access

    def _finish(self, ended: _Running) -> None:
        assert self._learner is not None, "only a policy that learns is told of ends"
        stop = self.trace.stops[ended.request] if self._use_stops else StopReason.UNKNOWN
        output = int(self.trace.output_tokens[ended.request])
        reply = self._learner.on_finish(ended.access, output, stop)
        unused_since = ended.nodes[self.tree.nodes.last_use.take(ended.nodes) == ended.used_at]
        self.tree.nodes.output_class[unused_since] = reply

    # -- storing -------------------------------------------------------------------------------

    def _store_rest(
        self, run: NDArray[np.int32], rows: Rows, hit: int, access: Access | None, now: float
    ) -> list[Nodes]:
        """Stores what was missed, as far as it is admitted; the nodes that it makes.

        Blocks that were used before and blocks that are new have different histories, hence two parts.
        """
        parent = int(rows[hit - 1]) if hit else NO_ROW
        again, new, known = AGAIN, NEW, hit
        if access is not None:
            again, new, known = access.history_again, access.history_new, max(access.returned_count, hit)
        elif self._listener is not None:
            known += self._listener.missed(run[hit:])
        nodes: list[Nodes] = []
        parts = ((run[hit:known], again), (run[known:], new))
        for ids, history in parts:
            if len(ids):
                made, parent, complete = self._store(ids, parent, history, now)
                nodes += made
                if not complete:
                    break
        return nodes

    def _store(
        self, ids: NDArray[np.int32], parent: int, history: int, now: float
    ) -> tuple[list[Nodes], int, bool]:
        """Stores a leading part of `ids` below `parent`: nodes made, last row, whether all were stored."""
        free = self.capacity_blocks - self.columns.count
        short = len(ids) - free
        if short > 0:
            self._evict(self._victims(short, history, now))
            free = self.capacity_blocks - self.columns.count
        stored = ids[:free]
        if len(stored) == 0:
            return [], parent, len(ids) == 0
        rows = self.columns.allocate(len(stored))
        at = rows.astype(np.intp)
        self._slots[at] = _SOME_SLOT
        self._row_of[stored] = rows
        self._id_of[at] = stored
        self.tree.add(_SPACE, parent, rows, now)
        self.tree.copies_added(Tier.DRAM, rows)
        self.stored_count += len(stored)
        nodes = self._nodes_of(rows)
        self.tree.nodes.gap_class[nodes] = history
        if history & 1:
            # They were used before they were evicted; what follows must not be appended to them.
            self.tree.nodes.reused[nodes] = 1
            self.tree.nodes.use_count[nodes] = 2
        self._pinned = self._pinned | set(nodes.tolist())
        return [nodes], int(rows[-1]), len(stored) == len(ids)

    def _nodes_of(self, rows: Rows) -> Nodes:
        """The nodes of a chain that was just added."""
        node_of = self.columns.mv.node
        if node_of[int(rows[0])] == node_of[int(rows[-1])]:
            return self.columns.node[rows[:1]]
        return np.unique(self.columns.node[rows])

    def _victims(self, count: int, history: int, now: float) -> Victims:
        if self._learner is None:
            return self.policy.victims(self.view, count, now, self._rng)
        return self._learner.victims_for(self.view, count, history, now, self._rng)

    def _evict(self, victims: Victims) -> None:
        gone = []
        for node, count in victims:
            rows = self.tree.tail_rows(Tier.DRAM, node, count)
            if self._listener is not None:
                self._listener.evicted(self._id_of.take(rows), bool(self.tree.nodes.reused[node]))
            self.tree.copies_dropped(Tier.DRAM, rows)
            self.tree.remove(rows)
            gone.append(rows)
        if gone:
            rows = np.concatenate(gone) if len(gone) > 1 else gone[0]
            at = rows.astype(np.intp)
            self._slots[at] = NO_SLOT
            self._row_of[self._id_of.take(at)] = NO_ROW
            self.columns.free(rows)
            self.evicted_count += len(rows)

    def _evictable(self, node: int, limit: int) -> int:
        return 0 if node in self._pinned else min(int(self.view.copies[node]), limit)
