"""Replays a trace against a node with several tiers and modelled links.

A request's chain is pinned until the request ends. What hits in a slower tier
is copied up and waited for; new blocks are written to the fastest tier, and to the
next where running requests hold all of it; what has to leave a tier is copied to
the next one, unless it has a copy there already or is worth less than what would
have to go for it there. A copy below stays when a block is promoted.

Not here: one tier alone (replay.py), plots (page.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import NO_ROW, NO_SLOT, Rows, Tier
from prefixd_server.base.views import Evictable, TierView
from prefixd_server.policy.importance import ImportancePolicy
from prefixd_server.policy.policy import Policy, Victims
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.history import POOL, SOME_SLOT, Part, ReplayState, Running
from prefixd_server.simulate.links import Links
from prefixd_server.simulate.traces import Trace


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of each tier, 0 for none, and of the KV of one token."""

    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int
    kv_bytes_per_token: int

    def blocks(self, block_tokens: int) -> dict[Tier, int]:
        """Blocks of each tier that is there, fastest first."""
        block_bytes = self.kv_bytes_per_token * block_tokens
        sizes = {Tier.HBM: self.hbm_bytes, Tier.DRAM: self.dram_bytes, Tier.NVME: self.nvme_bytes}
        return {tier: size // block_bytes for tier, size in sizes.items() if size // block_bytes}


class TierReplay(ReplayState):
    """See the module.

    Args:
        capacity_blocks: by tier, fastest first.
        block_bytes: bytes of one block's KV.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        capacity_blocks: dict[Tier, int],
        block_bytes: int,
        seed: int,
        serving: ServingModel | None = None,
        use_stops: bool = True,
    ) -> None:
        super().__init__(trace, policy, seed, serving, use_stops)
        self.tiers = list(capacity_blocks)
        self.block_bytes = block_bytes
        self.links = Links()
        self.capacity = capacity_blocks
        self.used = dict.fromkeys(self.tiers, 0)
        self.hit_blocks = dict.fromkeys(self.tiers, 0)
        self.hit_tokens = dict.fromkeys(self.tiers, 0.0)
        self.ttft_s: NDArray[np.float64] = np.zeros(trace.request_count)
        self._pins: NDArray[np.int32] = np.zeros(trace.block_count, dtype=np.int32)
        self._views: dict[Tier, TierView] = {
            tier: self.tree.view(tier, POOL, self._evictable(tier)) for tier in self.tiers
        }

    def request(self, request: int, now: float) -> int:
        """See ReplayState."""
        for ended in self.running.ended(now):
            self.tell_end(ended)
            self._pins[ended.rows] -= 1
        run = self.run_of(request)
        hit = self.known_count(run)
        rows = run[:hit]
        path = self.tree.path_nodes(rows) if hit else []
        access = self.learn(run, path, hit, now)
        if hit:
            self.tree.use(path, now)
        self._pins[rows] += 1
        ready_at = self._bring_up(request, rows, now)
        stored = [rows]
        for part in self.rest(run, hit, access):
            left = part.ids
            for tier in self.tiers:
                left = self._store(Part(left, part.history), tier, stored, path, now)
            if len(left):
                break
        self._book(request, hit, ready_at, now)
        ends_at = ready_at + self.serving.reply_s(
            self.missed_tokens(request, hit), self.output_tokens[request]
        )
        self.running.add(ends_at, Running(request, access, path, np.concatenate(stored), now))
        return hit

    def _book(self, request: int, hit: int, ready_at: float, now: float) -> None:
        missed = self.missed_tokens(request, hit)
        self.ttft_s[request] = ready_at - now + self.serving.ttft_s(missed)

    # -- up ------------------------------------------------------------------------------------

    def _bring_up(self, request: int, rows: Rows, now: float) -> float:
        """Copies what hits in a slower tier to the fastest, as far as there is room; when it is ready.

        What finds no room is read all the same.
        """
        left = float(self.trace.input_tokens[request])
        ready_at = now
        missing = np.ones(len(rows), dtype=np.bool_)
        for tier in self.tiers:
            here = missing & (self.columns.slot[tier][rows] != NO_SLOT)
            missing &= ~here
            found = int(here.sum())
            tokens = min(float(found * self.trace.block_tokens), left)
            left -= tokens
            self.hit_blocks[tier] += found
            self.hit_tokens[tier] += tokens
            arrived = now
            for step in (Tier.NVME, Tier.DRAM):
                if tier >= step:
                    arrived = self.links.up[step].move(found * self.block_bytes, arrived)
            ready_at = max(ready_at, arrived)
            if found and tier is not self.tiers[0]:
                for faster in self.tiers[: self.tiers.index(tier)]:
                    wanted = rows[here & (self.columns.slot[faster][rows] == NO_SLOT)]
                    room = self._make_room(faster, len(wanted), now)
                    self._put(faster, wanted[:room])
        return ready_at

    # -- down ----------------------------------------------------------------------------------

    def _store(self, part: Part, tier: Tier, stored: list[Rows], nodes: list[int], now: float) -> Rows:
        """Stores the first of these new blocks, as far as the tier has room; those that are left.

        Args:
            stored, nodes: of the request so far, from its first block on; added to.
        """
        room = self._admit(part, tier, now) if len(part.ids) else 0
        if room == 0:
            return part.ids
        parent = next((int(rows[-1]) for rows in reversed(stored) if len(rows)), NO_ROW)
        made = part.ids[:room]
        nodes += self.add(Part(made, part.history), parent, now)
        for crossed in (Tier.HBM, Tier.DRAM):
            if crossed < tier:
                self.links.down[crossed].move(room * self.block_bytes, now)
        self._put(tier, made)
        self._pins[made] += 1
        stored.append(made)
        return part.ids[room:]

    def _admit(self, part: Part, tier: Tier, now: float) -> int:
        """Room in a tier for new blocks: at any cost where a slower one catches what falls out."""
        if tier is not self.tiers[-1] or self.learner is None:
            return self._make_room(tier, len(part.ids), now)
        short = len(part.ids) - (self.capacity[tier] - self.used[tier])
        if short > 0:
            victims = self.learner.victims_for(self._views[tier], short, part.history, now, self.rng)
            for node, taken in victims:
                self._leave(tier, node, taken, now)
        return min(len(part.ids), self.capacity[tier] - self.used[tier])

    def _make_room(self, tier: Tier, count: int, now: float) -> int:
        """Sees to it that `count` copies fit into the tier; how many do, at most `count`."""
        short = count - (self.capacity[tier] - self.used[tier])
        if short > 0:
            for node, taken in self.policy.victims(self._views[tier], short, now, self.rng):
                self._leave(tier, node, taken, now)
        return min(count, self.capacity[tier] - self.used[tier])

    def _leave(self, tier: Tier, node: int, count: int, now: float) -> None:
        """Drops the node's deepest copies from the tier, those worth it after a copy in the next."""
        rows = self.tree.tail_rows(tier, node, count)
        slower = self.tiers[self.tiers.index(tier) + 1 :]
        kept = np.zeros(len(rows), dtype=np.bool_)
        for below in slower:
            kept |= self.columns.slot[below][rows] != NO_SLOT
        # From the head on, so that what is kept below has its ancestors.
        left = rows[~kept][::-1]
        for below in slower:
            if len(left) and below is Tier.NVME:
                # What outlives a restart is whole: copies of its ancestors go with it.
                path = self.tree.path(int(rows[0]))
                left = path[self.columns.slot[below][path] == NO_SLOT]
            room = self._admitted_below(below, node, len(left), now) if len(left) else 0
            for crossed in self.tiers[self.tiers.index(tier) : self.tiers.index(below)]:
                self.links.down[crossed].move(room * self.block_bytes, now)
            self._put(below, left[:room])
            left = left[room:]
        self._drop(tier, rows[: self._free_to_go(tier, rows)])

    def _admitted_below(self, tier: Tier, node: int, count: int, now: float) -> int:
        """Room in a slower tier for blocks of this node, at the cost of what is worth less there."""
        short = count - (self.capacity[tier] - self.used[tier])
        if short > 0:
            for victim, taken in self._worth_less(tier, node, short, now):
                self._leave(tier, victim, taken, now)
        return min(count, self.capacity[tier] - self.used[tier])

    def _worth_less(self, tier: Tier, node: int, count: int, now: float) -> Victims:
        view = self._views[tier]
        if isinstance(self.policy, ImportancePolicy):
            return self.policy.victims_for_node(view, count, node, now, self.rng)
        return self.policy.victims(view, count, now, self.rng)

    def _put(self, tier: Tier, rows: Rows) -> None:
        if len(rows):
            self.columns.slot[tier][rows] = SOME_SLOT
            self.tree.copies_added(tier, rows)
            self.used[tier] += len(rows)

    def _drop(self, tier: Tier, rows: Rows) -> None:
        """Drops copies; blocks without another are forgotten."""
        self.tree.copies_dropped(tier, rows)
        self.columns.slot[tier][rows] = NO_SLOT
        self.used[tier] -= len(rows)
        kept = np.zeros(len(rows), dtype=np.bool_)
        for other in self.tiers:
            kept |= self.columns.slot[other][rows] != NO_SLOT
        gone = rows[~kept]
        if len(gone):
            if self.listener is not None:
                reused = bool(self.tree.nodes.reused[self.columns.node[gone[0]]])
                self.listener.evicted(gone, reused)
            self.tree.remove(gone)
            self.columns.free(gone)

    def _evictable(self, tier: Tier) -> Evictable:
        """Copies that are not pinned, and in the last tier whose going leaves no block without its parent."""
        last = tier is self.tiers[-1]

        def count(node: int, limit: int) -> int:
            rows = self.tree.tail_rows(tier, node, limit)
            held = (self._pins[rows] != 0).nonzero()[0]
            free = int(held[0]) if len(held) else len(rows)
            return self._free_to_go(tier, rows[:free]) if last else free

        return count

    def _free_to_go(self, tier: Tier, rows: Rows) -> int:
        """How many of these deepest copies may go: kept elsewhere, or with nothing left below."""
        if len(rows) == 0:
            return 0
        kept = np.zeros(len(rows), dtype=np.bool_)
        for other in self.tiers:
            if other is not tier:
                kept |= self.columns.slot[other][rows] != NO_SLOT
        childless = np.empty(len(rows), dtype=np.bool_)
        childless[0] = self.tree.ends_with(tier, int(rows[0]))
        childless[1:] = ~kept[:-1] & (self.columns.parent[rows[:-1]] == rows[1:])
        free = kept | childless
        stop = int(free.argmin())
        return len(rows) if free[stop] else stop
