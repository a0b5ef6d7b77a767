"""The default policy: keep what is expected to be reused soonest, as learned from the workload.

    importance(b) = V_k(age) x delta_T(b)      per byte and second; blocks of a pool are of one size

V is the reuse index (hazard.py). Without a cost model delta_T is the same for
all blocks: what is kept saves the most tokens; with one it grows with position,
and what is kept saves the most time (POLICY.md C3, D3).

How it is told of the workload, once per request:
    access = policy.on_access(...)      when the request starts
    tree.classify(nodes, ...)           with the access's history bytes, by the caller
    policy.on_finish(access, ...)       when the reply has ended; the caller classifies again
A request that never ends may be forgotten by the caller; nothing is owed.

Not here: when and how much is evicted (the caller), what may not go (the view).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Hashes, StopReason
from prefixd_server.base.views import Nodes, TierView
from prefixd_server.policy.admission import ceiling_for
from prefixd_server.policy.choice import Choice, take_lowest
from prefixd_server.policy.hazard import HazardTable
from prefixd_server.policy.policy import Victims
from prefixd_server.policy.shortlist import Shortlist
from prefixd_server.policy.signals import (
    AGE_BUCKET_COUNT,
    REPLY_COUNT,
    RUNNING,
    Signal,
    age_bucket,
    age_buckets,
    describe,
    gap_code,
    gap_of,
    history_byte,
    reply_byte,
)
from prefixd_server.policy.tracker import HORIZON_MIN_S, ReuseTracker, Watched

DECAY = 0.99
DECAY_PERIOD_MIN_S = 30.0
DECAY_PERIOD_OF_RESIDENCE = 0.25
"""Evidence fades by DECAY each quarter of the mean residence, but not more often than the minimum."""
HUB_FANOUT_MIN = 4
"""A block with this many children is a shared prompt: what follows is a new conversation."""
SCAN_COUNT_MAX = 1024
"""Up to this many leaves all are compared; beyond it a sample is."""
SAMPLE_COUNT = 256
TAKEN_AT_ONCE = 12
"""Leaves that are sorted at first, and the most that are taken of one sample."""
TIE_BREAK_PER_S = 1e-9
"""Part of its importance that a block loses per idle second beside the index, which moves in steps."""
HORIZON_OF_RESIDENCE = 4.0
RESIDENCE_SMOOTHING = 0.01
PREFILL_MAX_S = 60.0
"""Blocks that are stored so long after their request began are taken to be of another, unknown one."""
NEVER = float("inf")

Weight = Callable[[NDArray[np.integer]], NDArray[np.float64]]
"""delta_T of blocks with so many blocks before them, in any one unit."""


@dataclass(frozen=True, slots=True)
class Access:
    """One request as the policy saw it.

    history_new, history_again: history bytes for blocks used for the first time, and again.
    returned_count: the run's leading blocks that were used before, kept or not.
    """

    history_new: int
    history_again: int
    returned_count: int
    watched: Watched


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Blocks that are to be stored: what a request missed.

    returned_count: the leading blocks that were used before and forgotten.
    used_at: when their request began, None where the sample does not tell.
    weight: delta_T, in the unit that the policy's weight has; 1 without one.
    """

    history_new: int
    history_again: int
    returned_count: int
    used_at: float | None
    weight: float = 1.0

    def parts(self, block_count: int) -> list[tuple[int, int, bool]]:
        """(count, history, whether they return) of the first `block_count` blocks, none of them empty."""
        returned = min(self.returned_count, block_count)
        both = (returned, self.history_again, True), (block_count - returned, self.history_new, False)
        return [part for part in both if part[0]]


class ImportancePolicy:
    """See the module.

    Args:
        weight: delta_T, where it differs between blocks of a pool.
        ignored: signals that decide nothing; for ablations.
    """

    name = "importance"

    def __init__(self, weight: Weight | None = None, ignored: Collection[Signal] = ()) -> None:
        self._weight = weight
        self.hazards = HazardTable(ignored)
        self.tracker = ReuseTracker(self.hazards)
        self._decayed_at: float | None = None
        self._residence_s = 0.0

    # -- learning ------------------------------------------------------------------------------

    def on_access(
        self,
        hashes: Hashes,
        hit_count: int,
        hit_idle_s: float,
        hit_fanout: int,
        now: float,
    ) -> Access:
        """A request starts.

        Args:
            hashes: of its whole run, from the first block on.
            hit_count: leading blocks that are kept.
            hit_idle_s: time since the last of those was used; any value when there is none.
            hit_fanout: children of that block, one that this request adds included.
        """
        self._advance(now)
        watched = self.tracker.find(hashes, now)
        deepest = self.tracker.last_use_of_deepest(watched)
        returned = hit_count
        gap: float | None = None
        if deepest is not None and deepest[0] >= hit_count:
            returned = deepest[0] + 1
            gap = now - deepest[1]
        elif hit_count and hit_fanout < HUB_FANOUT_MIN:
            gap = hit_idle_s
        code = gap_code(gap)
        access = Access(history_byte(code, reused=False), history_byte(code, reused=True), returned, watched)
        self.tracker.used(watched, access.history_new * REPLY_COUNT, access.history_again * REPLY_COUNT)
        return access

    def newcomers(self, hashes: Hashes, history_above: int, now: float) -> Newcomers:
        """What the access of a request has left in the sample about the blocks that it stores now.

        Args:
            hashes: of consecutive blocks of its run that are not kept.
            history_above: of the block before them; any without a gap for a first block.
        """
        watched = self.tracker.find(hashes, now)
        index, classes, used_at = self.tracker.known_classes(watched)
        code, returned = gap_of(history_above), 0
        known_at: float | None = None
        if len(index) and now - used_at <= PREFILL_MAX_S:
            known_at = used_at
            histories = classes // REPLY_COUNT
            code = gap_of(int(histories[-1]))
            again = (histories & 1).nonzero()[0]
            returned = int(index[again[-1]]) + 1 if len(again) else 0
        return Newcomers(
            history_byte(code, reused=False), history_byte(code, reused=True), returned, known_at
        )

    def on_finish(self, access: Access, output_token_count: int, stop: StopReason) -> int:
        """The reply of that request has ended. The reply byte for nodes not used since."""
        reply = reply_byte(output_token_count, stop)
        self.tracker.finished(access.watched, reply)
        return reply

    def _advance(self, now: float) -> None:
        """Measures, fades and rebuilds when it is time."""
        self.tracker.expose(now)
        if self._decayed_at is None:
            self._decayed_at = now
        if now - self._decayed_at < max(DECAY_PERIOD_MIN_S, DECAY_PERIOD_OF_RESIDENCE * self._residence_s):
            return
        self._decayed_at = now
        self.tracker.report()
        self.hazards.decay(DECAY)
        self.tracker.horizon_s = max(HORIZON_MIN_S, HORIZON_OF_RESIDENCE * self._residence_s)
        if self.hazards.needs_rebuild():
            self.hazards.rebuild(self.tracker.rate)

    # -- choosing ------------------------------------------------------------------------------

    def victims(self, view: TierView, block_count: int, now: float, rng: np.random.Generator) -> Victims:
        """See Policy."""
        return self.victims_below(view, block_count, NEVER, now, rng)

    def victims_for(
        self,
        view: TierView,
        block_count: int,
        history: int,
        now: float,
        rng: np.random.Generator,
        depth: int = 0,
        shortlist: Shortlist | None = None,
    ) -> Victims:
        """Victims that are worth less than new blocks of this history: admission and eviction in one.

        The caller stores as many new blocks as it has free slots and victims, the first of the run first.

        Args:
            depth: blocks before the first new one; decides where importance is weighed by it.
            shortlist: of this view, kept by the caller from one call to the next.
        """
        return self.victims_below(
            view, block_count, self.ceiling_for_new(history, depth), now, rng, shortlist
        )

    def ceiling_for_new(self, history: int, depth: int = 0) -> float:
        """What new blocks of this history displace is worth less than this."""
        worth = self._index_at(history, RUNNING, 0.0)
        if self._weight is not None:
            worth *= float(self._weight(np.array([depth]))[0])
        return ceiling_for(worth)

    def victims_for_node(
        self, view: TierView, block_count: int, node: int, now: float, rng: np.random.Generator
    ) -> Victims:
        """Victims that are worth less than this node's blocks, which come from a faster tier."""
        return self.victims_below(view, block_count, self._score(view, node, now), now, rng)

    def victims_below(
        self,
        view: TierView,
        block_count: int,
        ceiling: float,
        now: float,
        rng: np.random.Generator,
        shortlist: Shortlist | None = None,
    ) -> Victims:
        """The least important leaves, up to `block_count` blocks, all of an importance below `ceiling`."""
        choice = Choice(view, block_count)

        def score_of(node: int) -> float:
            return self._score(view, node, now)

        def look() -> tuple[Nodes, NDArray[np.float64]]:
            nodes = view.leaves()
            return nodes, self.scores(view, nodes, now)

        if view.leaf_count > SCAN_COUNT_MAX:
            self._take_of_samples(choice, score_of, ceiling, now, rng)
        else:
            (shortlist or Shortlist()).take(choice, look, score_of, ceiling, now)
        if choice.victims:
            idle = now - float(view.last_use[choice.victims[0][0]])
            self._residence_s += RESIDENCE_SMOOTHING * (idle - self._residence_s)
        return choice.victims

    def _take_of_samples(
        self,
        choice: Choice,
        score_of: Callable[[int], float],
        ceiling: float,
        now: float,
        rng: np.random.Generator,
    ) -> None:
        """Takes the lowest leaves of samples; where a sample gives nothing, of all leaves."""
        view = choice.view
        sampling, stopped = True, False
        while choice.left > 0 and sampling and not stopped:
            nodes = self._sample(view, choice.met, rng)
            before = len(choice.met)
            stopped = take_lowest(
                choice, nodes, self.scores(view, nodes, now), score_of, ceiling, TAKEN_AT_ONCE
            )
            sampling = len(choice.met) > before
        if choice.left > 0 and not stopped:
            nodes = view.leaves()
            take_lowest(choice, nodes, self.scores(view, nodes, now), score_of, ceiling, len(nodes))

    def _sample(self, view: TierView, met: set[int], rng: np.random.Generator) -> Nodes:
        """Some of many leaves that were not met yet; a leaf may come twice."""
        nodes = view.leaves()
        nodes = nodes.take((rng.random(SAMPLE_COUNT) * len(nodes)).astype(np.intp))
        return nodes[np.isin(nodes, list(met), invert=True)] if met else nodes

    # -- scores --------------------------------------------------------------------------------

    def scores(self, view: TierView, nodes: Nodes, now: float) -> NDArray[np.float64]:
        """See Policy; among equals the longer unused is a trace less important."""
        at = nodes.astype(np.intp)
        idle = now - view.last_use.take(at)
        places = age_buckets(idle)
        places += np.multiply(view.gap_class.take(at), REPLY_COUNT * AGE_BUCKET_COUNT, dtype=np.intp)
        places += np.multiply(view.output_class.take(at), AGE_BUCKET_COUNT, dtype=np.intp)
        scores = self.hazards.index.take(places)
        if self._weight is not None:
            scores *= self._weight(view.tail_depths(nodes))
        idle *= -TIE_BREAK_PER_S
        idle += 1.0
        scores *= idle
        return scores

    def _score(self, view: TierView, node: int, now: float) -> float:
        """Importance of one node, as scores() has it."""
        idle = now - float(view.last_use[node])
        score = self._index_at(int(view.gap_class[node]), int(view.output_class[node]), idle)
        if self._weight is not None:
            score *= float(self._weight(view.tail_depths(np.array([node], dtype=np.int32)))[0])
        return score * (1.0 - TIE_BREAK_PER_S * idle)

    def _index_at(self, history: int, reply: int, idle_s: float) -> float:
        place = (history * REPLY_COUNT + reply) * AGE_BUCKET_COUNT + age_bucket(idle_s)
        return float(self.hazards.index[place])

    def explain(self, view: TierView, node: int, now: float) -> dict[str, str]:
        """The signals of a node and what it is worth, for people."""
        history, reply = int(view.gap_class[node]), int(view.output_class[node])
        idle = now - float(view.last_use[node])
        return describe(history, reply) | {
            "idle": f"{idle:.1f} s",
            "reuse index": f"{self._index_at(history, reply, idle):.3g} reuses per second kept",
            "importance": f"{self._score(view, node, now):.3g}",
        }

    @property
    def nbytes(self) -> int:
        """Memory of what is learned; of a fixed size."""
        return self.hazards.nbytes + self.tracker.nbytes
