"""The prefix tree against a plain model, check() after each step."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prefixd_server.base.types import NO_ROW, NO_SLOT, Tier

from tests.support.forest import Forest

BLOCKS_MAX = 400
DEVICES = {Tier.HBM: (range(10), range(10, 20))}


class TreeMachine(RuleBasedStateMachine):
    """Chains added, used, copied, dropped and removed in any order."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.forest = Forest(devices=DEVICES)
        self.now = 1.0

    def some_row(self, space: int | None = None) -> int | None:
        rows = [row for row, block in self.forest.blocks.items() if space in (None, block.space)]
        return int(self.rng.choice(rows)) if rows else None

    @rule(
        space=st.integers(0, 2),
        count=st.integers(1, 30),
        below=st.booleans(),
        tiers=st.sets(st.sampled_from(Tier)),
    )
    def add(self, space: int, count: int, below: bool, tiers: set[Tier]) -> None:
        if len(self.forest.blocks) > BLOCKS_MAX:
            return
        parent = self.some_row(space) if below else None
        self.forest.add(space, NO_ROW if parent is None else parent, count, self.now, tuple(tiers))

    @rule(passed=st.sampled_from([0.0, 0.5]))
    def use(self, passed: float) -> None:
        row = self.some_row()
        if row is None:
            return
        self.now += passed
        run = np.array(self.forest.path(row), dtype=np.int32)
        nodes = self.forest.tree.touch(run, self.now)
        lengths = self.forest.tree.nodes.length[nodes]
        assert lengths.sum() == len(run)
        assert (self.forest.columns.node[run] == np.repeat(nodes, lengths)).all()
        assert (self.forest.tree.last_use[nodes] == self.now).all()

    @rule(tier=st.sampled_from(Tier), count=st.integers(1, 60))
    def copy(self, tier: Tier, count: int) -> None:
        row = self.some_row()
        if row is not None:
            rows = self.forest.tree.subtree(row)
            self.forest.copy(tier, rows[self.forest.columns.slot[tier][rows] == NO_SLOT][:count])

    @rule(tier=st.sampled_from(Tier), count=st.integers(1, 60), deepest_first=st.booleans())
    def drop(self, tier: Tier, count: int, deepest_first: bool) -> None:
        row = self.some_row()
        if row is not None:
            rows = self.forest.tree.subtree(row)
            held = rows[self.forest.columns.slot[tier][rows] != NO_SLOT]
            self.forest.drop(tier, (held[::-1] if deepest_first else held)[:count])

    @rule(shuffled=st.booleans())
    def forget(self, shuffled: bool) -> None:
        row = self.some_row()
        if row is not None:
            rows = self.forest.tree.subtree(row)
            self.forest.forget(self.rng.permutation(rows) if shuffled else rows)

    @rule(space=st.integers(0, 2), limit=st.integers(1, 50))
    def forget_some(self, space: int, limit: int) -> None:
        rows = self.forest.tree.some_of(space, limit)
        held = self.forest.tree.block_count(space)
        assert len(rows) == min(limit, held)
        self.forest.forget(rows)

    @rule(limit=st.integers(1, 50))
    def forget_the_lowest(self, limit: int) -> None:
        row = self.some_row()
        if row is not None:
            below = self.forest.subtree(row)
            rows = self.forest.tree.lowest(row, limit)
            assert len(rows) == min(limit, len(below))
            assert below.issuperset(rows.tolist())
            self.forest.forget(rows)

    @rule()
    def walk(self) -> None:
        row = self.some_row()
        if row is None:
            return
        tree = self.forest.tree
        assert tree.path(row).tolist() == self.forest.path(row)
        assert set(tree.children(row).tolist()) == self.forest.children(row)
        below = tree.subtree(row).tolist()
        assert set(below) == self.forest.subtree(row)
        assert len(below) == len(set(below))
        place = {r: i for i, r in enumerate(below)}
        assert all(r == row or place[self.forest.blocks[r].parent] < place[r] for r in below)

    @rule(where=st.sampled_from([(Tier.HBM, 0), (Tier.HBM, 1), (Tier.DRAM, 0)]), pool=st.integers(0, 2))
    def look(self, where: tuple[Tier, int], pool: int) -> None:
        tier, device = where
        view = self.forest.tree.view(tier, pool, lambda node, limit: limit, device=device)
        oldest = list(view.oldest())
        assert sorted(oldest) == sorted(view.leaves().tolist())
        assert view.leaf_count == len(oldest)
        order = list(view.by_age())
        assert [node for node in order if node in set(oldest)] == oldest
        rows = {
            r
            for r, block in self.forest.blocks.items()
            if tier in block.tiers and block.space // 2 == pool and self.forest.device_of(tier, r) == device
        }
        tails = [self.forest.tree.tail_rows(tier, node, BLOCKS_MAX * 2, device).tolist() for node in order]
        assert [len(tail) for tail in tails] == [int(view.copies[node]) for node in order]
        assert sorted(row for tail in tails for row in tail) == sorted(rows)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.forest.verify()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
