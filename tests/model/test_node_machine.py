"""The node against the plain model, step by step, with check() after each.

Several engine instances of several processes, two tenants, three namespaces
(two block sizes, one of two shards) on a store small enough to be full all the
time. Seeded: a failure prints the steps that replay it.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from prefixd_server.base.errors import StateConflict
from prefixd_server.cache.sessions import Session

from tests.model.ground import INSTANCES, NAMESPACES, namespaces, paths, pick, seldom
from tests.model.reading_rules import ReadingRules
from tests.model.writing_rules import WritingRules
from tests.support.node import chain, packed


class NodeMachine(WritingRules, ReadingRules):
    """See the module."""

    # -- engines come and go -------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        for (tenant, model_id), what in NAMESPACES.items():
            self.refs[tenant, model_id] = self.cache.open_namespace(tenant, what)
            self.model.epochs[tenant, model_id] = self.refs[tenant, model_id].epoch
        for tenant in ("red", "blue"):
            for instance in INSTANCES:
                self.sessions.append(self.node.open_session(tenant, instance))

    @rule(tenant=st.sampled_from(["red", "blue"]), instance=st.sampled_from(INSTANCES))
    @precondition(lambda self: sum(not s.ended for s in self.sessions) < 8)
    def engine_starts(self, tenant: str, instance: str) -> None:
        self.sessions.append(self.node.open_session(tenant, instance))

    @rule(number=pick, dies=st.booleans(), really=seldom)
    def engine_goes(self, number: int, dies: bool, really: bool) -> None:
        alive = [s for s in self.sessions if not s.dead]
        if not alive or not really:
            return
        session = alive[number % len(alive)]
        was_open = not session.ended
        if dies:
            self.cache.sessions.process_dead(session.session_id)
            session.dead = True
        else:
            self.cache.sessions.transport_lost(session.session_id)
        others = any(
            s is not session
            and not s.ended
            and (s.tenant, s.instance_id) == (session.tenant, session.instance_id)
            for s in self.sessions
        )
        if was_open:
            self._readers_lose(session, others)
        for writer in [w for w in self.model.writers.values() if w.session_id == session.session_id]:
            if dies:
                self.model.end_writer(writer)
            elif not writer.quarantined:
                self.model.quarantine(writer)

    def _readers_lose(self, session: Session, instance_lives: bool) -> None:
        for reader in list(self.model.readers.values()):
            if (reader.tenant, reader.instance_id) != (session.tenant, session.instance_id):
                continue
            for shard, holder in list(reader.shards.items()):
                if not instance_lives or holder == session.session_id:
                    del reader.shards[shard]
            if not reader.shards:
                del self.model.readers[reader.token]

    # -- time and operators --------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 0.5, 0.5, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.node.clock.advance(seconds)
        self.cache.step()
        self.model.expire(self.node.clock.now())

    @rule(name=namespaces, path=paths, keep=st.integers(0, 3), really=seldom)
    def operator_evicts(self, name: tuple[str, str], path: tuple[str, ...], keep: int, really: bool) -> None:
        if not really:
            return
        hashes = packed([key[4] for key in self.keys(name, 0, path)])
        self.cache.evict(name[0], self.refs[name], hashes, keep)
        self.sync_evictions()

    @rule(name=namespaces, path=paths, pinned=st.booleans())
    def operator_pins(self, name: tuple[str, str], path: tuple[str, ...], pinned: bool) -> None:
        hashes = packed([key[4] for key in self.keys(name, 0, path)])
        self.cache.pin(name[0], self.refs[name], hashes, pinned)
        for shard in range(NAMESPACES[name].shard_count):
            for key in self.keys(name, shard, path):
                if self.model.visible(key):
                    self.model.blocks[key].pinned = pinned

    @rule(name=namespaces, really=seldom)
    def operator_drops_and_reopens(self, name: tuple[str, str], really: bool) -> None:
        if not really:
            return
        old = self.refs[name]
        new_epoch, _ = self.node.run(self.cache.drop_namespace(name[0], old))
        assert new_epoch > old.epoch
        with pytest.raises(StateConflict):
            self.cache.lookup(name[0], old, packed(chain("x")))
        self.refs[name] = self.cache.open_namespace(name[0], NAMESPACES[name])
        assert self.refs[name].epoch == new_epoch
        self.model.epochs[name] = new_epoch
        for key in [k for k in self.model.blocks if k[:2] == name]:
            del self.model.blocks[key]
        for reader in [r for r in self.model.readers.values() if (r.tenant, r.model_id) == name]:
            del self.model.readers[reader.token]

    @rule()
    def background_work_goes_on(self) -> None:
        self.node.run(asyncio.sleep(0))

    # -- what must always hold -----------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        assert self.cache.check() == []
        self.sync_evictions()
        for key, block in self.model.blocks.items():
            assert self.known(key), f"{key} ({block}) vanished"
        listed = {info.token_prefix for tenant in ("red", "blue") for info in self.cache.list_leases(tenant)}
        expected = {token[:4].hex() for token in (*self.model.readers, *self.model.writers)}
        assert listed == expected


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(
    max_examples=120,
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
