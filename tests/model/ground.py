"""The ground of the node machine: a node, the plain model, and what the rules share."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from prefixd_server.base.types import (
    NO_ROW,
    NamespaceRef,
)
from prefixd_server.cache.sessions import Session

from tests.model.plain_model import Key, PlainModel
from tests.support.node import Node, block_data, chain, packed, start_node
from tests.support.specs import spec

TTL_S = 10.0
NAMESPACES = {
    ("red", "small"): spec("small", block_bytes=250_000),
    ("red", "sharded"): spec("sharded", block_bytes=400_000, shard_count=2),
    ("blue", "small"): spec("small", block_bytes=250_000),
}
INSTANCES = ("one", "two")
paths = st.lists(st.sampled_from("aab"), min_size=1, max_size=6).map(tuple)
namespaces = st.sampled_from(sorted(NAMESPACES))
pick = st.integers(0, 1 << 16)
seldom = st.integers(0, 7).map(lambda number: number == 7)


class Ground(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.node: Node = start_node(dram_bytes=8 << 20, segment_bytes=2 << 20, tenants=("red", "blue"))
        self.cache = self.node.cache
        self.model = PlainModel()
        self.sessions: list[Session] = []
        self.refs: dict[tuple[str, str], NamespaceRef] = {}
        self.evicted_before = 0

    def teardown(self) -> None:
        self.node.close()

    # -- helpers -------------------------------------------------------------------------------

    def keys(self, name: tuple[str, str], shard: int, path: tuple[str, ...]) -> list[Key]:
        tenant, model_id = name
        return [(tenant, model_id, self.refs[name].epoch, shard, h) for h in chain(model_id, *path)[1:]]

    def session_of(self, tenant: str, number: int) -> Session:
        mine = [s for s in self.sessions if s.tenant == tenant and not s.ended]
        if not mine:
            self.sessions.append(self.node.open_session(tenant, INSTANCES[number % 2]))
            return self.sessions[-1]
        return mine[number % len(mine)]

    def deadline(self) -> float:
        return self.node.clock.now() + TTL_S

    def sync_evictions(self) -> None:
        """Blocks that the node evicted for space: allowed only when unleased, unpinned and leaves."""
        gone = [key for key in self.model.blocks if self.model.kept(key) and not self.known(key)]
        evicted = sum(counters.evicted for counters in self.cache.state.counters.values())
        assert len(gone) <= evicted - self.evicted_before, f"{len(gone)} blocks vanished without an eviction"
        self.evicted_before = evicted
        leased = self.model.leased()
        for key in gone:
            assert key not in leased, "a leased block was evicted"
            assert not self.model.blocks[key].pinned, "a pinned block was evicted"
        for key in gone:
            del self.model.blocks[key]
        for key, block in self.model.blocks.items():
            assert block.parent is None or block.parent in self.model.blocks, (
                f"{key} stayed without its parent"
            )

    def known(self, key: Key) -> bool:
        tenant, model_id, epoch, shard, block_hash = key
        catalog = self.cache.state.catalog
        namespace = catalog.namespaces.get(
            tenant, NamespaceRef(self.refs[tenant, model_id].fingerprint, epoch)
        )
        space = catalog.namespaces.space(namespace, shard, 0)
        return bool(catalog.find(space, packed([block_hash]))[0] != NO_ROW)

    def _data(self, key: Key) -> bytes:
        what = NAMESPACES[key[0], key[1]]
        return block_data(key[4], key[3], what.kv_groups[0].block_bytes)
