"""Replays a trace against a node with several tiers and modelled links.

What a request hits is held until the request ends. New blocks are written to DRAM. What hits in
NVMe is copied to DRAM and waited for, and its copy below stays. What no request waits for goes on
between the requests, on the links' time (background.py, queueing.py). A tier alone keeps what is
worth most; above NVMe, DRAM takes everything and drops what can go without a loss.

Not here: one tier whose requests end as they begin (replay.py), plots (page.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.config import MigrationConfig
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.sizes import format_size
from prefixd_server.base.types import NO_ROW, Rows, Tier
from prefixd_server.cache.room import slack_count
from prefixd_server.cache.worth import AT_ANY_PRICE
from prefixd_server.policy.importance import Access
from prefixd_server.policy.policy import Policy
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.background import Background
from prefixd_server.simulate.copies import NodeCopies
from prefixd_server.simulate.history import Part, Running
from prefixd_server.simulate.queueing import Queue
from prefixd_server.simulate.traces import Trace


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of each tier, 0 for none, and of the KV of one token."""

    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int
    kv_bytes_per_token: int

    def blocks(self, block_tokens: int) -> dict[Tier, int]:
        """Blocks of each tier that is there, fastest first.

        Raises:
            ConfigError: TIER_TOO_SMALL, a tier holds no block; DRAM_MISSING, HBM and NVMe without it.
        """
        block_bytes = self.kv_bytes_per_token * block_tokens
        sizes = {Tier.HBM: self.hbm_bytes, Tier.DRAM: self.dram_bytes, Tier.NVME: self.nvme_bytes}
        there = {tier: size for tier, size in sizes.items() if size}
        for tier, size in there.items():
            if size < block_bytes:
                raise ConfigError(
                    "TIER_TOO_SMALL",
                    f"--{tier.name.lower()} {format_size(size)} holds no block of "
                    f"{format_size(block_bytes)}: raise it, or leave the tier out",
                )
        if len(there) > 1 and Tier.DRAM not in there:
            raise ConfigError("DRAM_MISSING", "--hbm and --nvme stand beside DRAM: give --dram too")
        return {tier: size // block_bytes for tier, size in there.items()}


class TierReplay(NodeCopies):
    """See the module.

    Args:
        capacity_blocks: by tier, fastest first.
        block_bytes: bytes of one block's KV.
        queue_s: how long each request waits in the engine's queue, known to the daemon.
        migration: watermarks and bounds, as in the daemon's configuration.
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
        queue_s: float = 0.0,
        migration: MigrationConfig | None = None,
    ) -> None:
        super().__init__(trace, policy, capacity_blocks, block_bytes, seed, serving, use_stops)
        migration = migration or MigrationConfig()
        self.hit_blocks = dict.fromkeys(self.tiers, 0)
        self.hit_tokens = dict.fromkeys(self.tiers, 0.0)
        self.ttft_s: NDArray[np.float64] = np.zeros(trace.request_count)
        self.background = Background(self, migration)
        self.queue_s = queue_s
        self.queue = Queue(self, migration) if queue_s and self.line is not None else None

    def run(self, progress: Callable[[int], None] | None = None) -> NDArray[np.int64]:
        """See ReplayState. A request begins when it has waited in the queue."""
        hits = np.zeros(self.trace.request_count, dtype=np.int64)
        arrivals = self.trace.arrival_s.tolist()
        joined = 0
        for request, arrival in enumerate(arrivals):
            begins = arrival + self.queue_s
            while self.queue is not None and joined < len(arrivals) and arrivals[joined] <= begins:
                self.advance(arrivals[joined])
                self.queue.joined(joined, self.run_of(joined), self.background.may_begin())
                joined += 1
            hits[request] = self.request(request, begins)
            if progress is not None:
                progress(request)
        return hits

    def advance(self, now: float) -> None:
        """What goes on without a request until now."""
        while True:
            arrives_at = self.queue.next_at if self.queue is not None else float("inf")
            if min(arrives_at, self.background.next_at) > now:
                break
            if self.queue is not None and arrives_at <= self.background.next_at:
                self.queue.step(self.background.may_begin())
            else:
                self.background.step()
        self.end_replies(now)
        self.clock.at = now

    def request(self, request: int, now: float) -> int:
        """See ReplayState."""
        self.advance(now)
        run = self.run_of(request)
        hit = self.known_count(run)
        rows = run[:hit]
        path = self.tree.path_nodes(rows) if hit else []
        access = self.learn(run, path, hit, now)
        shared = self.background.shared(rows)
        if hit:
            self.tree.use(path, now)
        ready_at = self._bring_up(request, rows, now)
        if self.background.may_begin():
            self.background.place(shared)
        stored = self._store(request, run, hit, access, path, now)
        missed = self.missed_tokens(request, hit)
        self.ttft_s[request] = ready_at - now + self.serving.ttft_s(missed)
        ends_at = ready_at + self.serving.reply_s(missed, self.output_tokens[request])
        self.running.add(ends_at, Running(request, access, path, stored, now))
        self.background.wake(now)
        return hit

    # -- up ------------------------------------------------------------------------------------

    def _bring_up(self, request: int, rows: Rows, now: float) -> float:
        """Holds what hits, and copies to DRAM what lies below, as far as there is room; when it is ready.

        What finds no room is read all the same.
        """
        ready_at = now
        if self.queue is not None:
            there = self.queue.arrived(rows)
            ready_at = max(now, self.queue.left(request, rows))
        else:
            there = np.ones(len(rows), dtype=np.bool_)
        left = float(self.trace.input_tokens[request])
        missing = np.ones(len(rows), dtype=np.bool_)
        for tier in self.tiers:
            here = missing & ~self.lacking(tier, rows)
            self.hold_for(request, tier, rows[here])
            if tier is Tier.DRAM:
                here &= there
            missing &= ~here
            found = int(here.sum())
            tokens = min(float(found * self.trace.block_tokens), left)
            left -= tokens
            self.hit_blocks[tier] += found
            self.hit_tokens[tier] += tokens
            arrived = now
            if tier is Tier.NVME:
                cold = rows[here] if tier is self.store_tier else rows[here & self.lacking(Tier.DRAM, rows)]
                arrived = self.links.up[tier].move(len(cold) * self.block_bytes, now)
                if tier is not self.store_tier:
                    self._promote(request, cold)
            if tier >= Tier.DRAM:
                there_at = max(arrived, ready_at)
                arrived = self.links.up[Tier.DRAM].move(found * self.block_bytes, now, there_at)
            ready_at = max(ready_at, arrived)
        return ready_at

    def _promote(self, request: int, rows: Rows) -> None:
        """Copies to DRAM what a request reads from NVMe."""
        rows = rows[: self.make_room(Tier.DRAM, len(rows))]
        self.put(Tier.DRAM, rows)
        self.hold_for(request, Tier.DRAM, rows)

    # -- down ----------------------------------------------------------------------------------

    def _store(
        self, request: int, run: Rows, hit: int, access: Access | None, path: list[int], now: float
    ) -> Rows:
        """Writes what was missed, as far as it is admitted; those blocks.

        Args:
            path: nodes of the request; added to.
        """
        tier = self.store_tier
        parts = self.rest(run, hit, access)
        room = self._room_for(parts, len(run) - hit)
        parent = int(run[hit - 1]) if hit else NO_ROW
        stored = run[hit : hit + room]
        for part in parts:
            ids = part.ids[:room]
            room -= len(ids)
            if len(ids):
                path += self.add(Part(ids, part.history), parent, now)
                parent = int(ids[-1])
        self.put(tier, stored)
        self.hold_for(request, tier, stored)
        for crossed in (Tier.HBM, Tier.DRAM):
            if crossed < tier:
                self.links.down[crossed].move(len(stored) * self.block_bytes, now)
        return stored

    def _room_for(self, parts: list[Part], count: int) -> int:
        """Room for new blocks: at any price where a slower tier has what goes, else for what is worth it."""
        tier = self.store_tier
        if self.line is not None:
            return self.make_room(tier, count)
        slack = slack_count(self.capacity[tier])
        placed = 0
        for part in parts:
            placed += len(part.ids)
            short = placed - self.free(tier)
            worth = AT_ANY_PRICE if self.learner is None else self.learner.ceiling_for_new(part.history)
            if short > 0 and self.evict(tier, short + slack, worth) < short:
                break
        return min(count, self.free(tier))
