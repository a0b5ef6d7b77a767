"""Replays a trace against one tier of a given size: the catalog's tree and a policy, on the trace's clock.

Hits are judged when a request arrives, cold start included. A request's own
chain is pinned only at that instant. A block is known exactly as long as it has
its copy.

Not here: several tiers and links (tiers.py), policies outside the tree
(baselines/flat.py), the offline optimum (optimum.py).
"""

from __future__ import annotations

import numpy as np

from prefixd_server.base.types import NO_ROW, NO_SLOT, Rows, Tier
from prefixd_server.policy.importance import Access
from prefixd_server.policy.policy import Policy, Victims
from prefixd_server.policy.shortlist import Shortlist
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.history import POOL, SOME_SLOT, Part, ReplayState, Running
from prefixd_server.simulate.traces import Trace

_TIER = Tier.DRAM
_NO_ROWS: Rows = np.zeros(0, dtype=np.int32)


class Replay(ReplayState):
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
        super().__init__(trace, policy, seed, serving, use_stops)
        self.capacity_blocks = capacity_blocks
        self.view = self.tree.view(_TIER, POOL, self._evictable)
        self.evicted_count = 0
        self.stored_count = 0
        self._pinned: set[int] = set()
        self._shortlist = Shortlist()
        self.presence = self.tree.tiers[_TIER]
        self._slots = self.columns.slot[_TIER]

    def request(self, request: int, now: float) -> int:
        """See ReplayState."""
        for ended in self.running.ended(now):
            self.tell_end(ended)
        run = self.run_of(request)
        hit = self.known_count(run)
        path = self.tree.path_nodes(run[:hit]) if hit else []
        self._pinned = set(path)
        access = self.learn(run, path, hit, now)
        if hit:
            self.tree.use(path, now)
        if hit < len(run):
            path += self._store_rest(run, hit, access, now)
        if access is not None:
            reply = self.serving.reply_s(self.missed_tokens(request, hit), self.output_tokens[request])
            self.running.add(now + reply, Running(request, access, path, _NO_ROWS, now))
        return hit

    def _store_rest(self, run: Rows, hit: int, access: Access | None, now: float) -> list[int]:
        """Stores what was missed, as far as it is admitted; the nodes that it makes."""
        parent = int(run[hit - 1]) if hit else NO_ROW
        nodes: list[int] = []
        for part in self.rest(run, hit, access):
            admitted = self._admitted(part, parent, now)
            stored = admitted.ids
            if len(stored) == 0:
                break
            made = self.add(admitted, parent, now)
            self._slots[stored] = SOME_SLOT
            if len(made) == 1:
                self.presence.add(made[0], len(stored))
            else:
                self.tree.copies_added(_TIER, stored)
            self.stored_count += len(stored)
            nodes += made
            self._pinned.update(made)
            parent = int(stored[-1])
            if len(stored) < len(part.ids):
                break
        return nodes

    def _admitted(self, part: Part, parent: int, now: float) -> Part:
        """Makes room for the part: as much of its beginning as the policy gives room to."""
        short = len(part.ids) - (self.capacity_blocks - self.columns.count)
        if short > 0:
            self._evict(self._victims(short, part.history, parent, now))
            free = self.capacity_blocks - self.columns.count
            if free < len(part.ids):
                return Part(part.ids[:free], part.history)
        return part

    def _victims(self, count: int, history: int, parent: int, now: float) -> Victims:
        if self.learner is None:
            return self.policy.victims(self.view, count, now, self.rng)
        depth = self.columns.mv.depth[parent] + 1 if parent != NO_ROW else 0
        return self.learner.victims_for(self.view, count, history, now, self.rng, depth, self._shortlist)

    def _evict(self, victims: Victims) -> None:
        gone = []
        for node, count in victims:
            rows = self.tree.tail_rows(_TIER, node, count)
            if self.listener is not None:
                self.listener.evicted(rows, bool(self.tree.nodes.reused[node]))
            self.presence.drop(node, count)
            self.tree.shorten(node, int(rows[-1]), count)
            gone.append(rows)
        if gone:
            rows = np.concatenate(gone) if len(gone) > 1 else gone[0]
            self._slots[rows] = NO_SLOT
            self.columns.free(rows)
            self.evicted_count += len(rows)

    def _evictable(self, node: int, limit: int) -> int:
        return 0 if node in self._pinned else min(int(self.view.copies[node]), limit)
