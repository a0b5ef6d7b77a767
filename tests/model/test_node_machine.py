"""The node against the plain model, step by step, with check() after each.

Several engine instances of several processes, two tenants, three namespaces
(two block sizes, one of two shards) on a store small enough to be full all the
time. Seeded: a failure prints the steps that replay it.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefixd_server.base.errors import NotFound, StateConflict
from prefixd_server.base.types import (
    NO_ROW,
    BadBlock,
    Checksums,
    Extent,
    LeaseGrant,
    LeaseRelease,
    NamespaceRef,
    ReserveOutcome,
    Tier,
)
from prefixd_server.cache.sessions import Session

from tests.model.plain_model import Block, Key, PlainModel, Reader, Writer, places
from tests.support.node import Node, block_data, chain, checksum, packed, start_node, write_blocks
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


class NodeMachine(RuleBasedStateMachine):
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

    # -- writing -------------------------------------------------------------------------------

    @rule(name=namespaces, path=paths, number=pick)
    def engine_stores_a_run(self, name: tuple[str, str], path: tuple[str, ...], number: int) -> None:
        for shard in range(NAMESPACES[name].shard_count):
            writer = self.reserve(name, path, 0, shard, number)
            if writer is not None:
                self._commit(writer, len(writer.keys))

    @rule(
        name=namespaces,
        path=paths,
        start=st.sampled_from([0, 0, 0, 1, 3]),
        shard=st.integers(0, 1),
        number=pick,
    )
    def engine_reserves(
        self, name: tuple[str, str], path: tuple[str, ...], start: int, shard: int, number: int
    ) -> None:
        self.reserve(name, path, start, shard, number)

    def reserve(
        self, name: tuple[str, str], path: tuple[str, ...], start: int, shard: int, number: int
    ) -> Writer | None:
        tenant = name[0]
        session = self.session_of(tenant, number)
        shard = shard % NAMESPACES[name].shard_count
        start = min(start, len(path) - 1)
        keys = self.keys(name, shard, path)
        parent = keys[start - 1] if start else None
        answer = self.cache.reserve(
            tenant,
            session.session_id,
            self.refs[name],
            shard,
            0,
            packed([parent[4]]) if parent else None,
            packed([key[4] for key in keys[start:]]),
            TTL_S,
        )
        self.sync_evictions()
        run = keys[start:]
        assert sum(count for _, count in answer.outcomes) == len(run)
        outcome_of = [outcome for outcome, count in answer.outcomes for _ in range(count)]
        if parent is not None and parent not in self.model.blocks:
            assert set(outcome_of) == {ReserveOutcome.DECLINED}
            return None
        reserved: list[Key] = []
        above = parent
        for key, outcome in zip(run, outcome_of, strict=True):
            known = self.model.blocks.get(key)
            if known is not None:
                expected = ReserveOutcome.PENDING if known.writer else ReserveOutcome.PRESENT
                assert outcome is expected
            elif outcome is ReserveOutcome.RESERVED:
                reserved.append(key)
                assert answer.lease is not None
                self.model.blocks[key] = Block(above, answer.lease.token)
            else:
                assert outcome is ReserveOutcome.DECLINED
            above = key
        return self._take_writer(answer.lease, answer.extents, reserved, session, name)

    def _take_writer(
        self,
        lease: LeaseGrant | None,
        extents: tuple[Extent, ...],
        reserved: list[Key],
        session: Session,
        name: tuple[str, str],
    ) -> Writer | None:
        taken = places(extents)
        assert len(taken) == len(set(taken)) == len(reserved)
        assert not set(taken) & self.model.quarantined_places(), "a quarantined slot was given out"
        assert not set(taken) & self.model.writing_places(), "a slot was given to two writers"
        if lease is None:
            assert not reserved
            return None
        token = lease.token
        self.model.writers[token] = Writer(
            token,
            session.session_id,
            name[0],
            name[1],
            self.refs[name].epoch,
            reserved,
            extents,
            self.deadline(),
        )
        return self.model.writers[token]

    @rule(number=pick, count=st.integers(1, 4))
    def engine_commits(self, number: int, count: int) -> None:
        writer = self._writer(number)
        if writer is not None:
            self._commit(writer, count)

    def _commit(self, writer: Writer, count: int) -> None:
        keys = writer.open_keys[:count]
        datas = [self._data(key) for key in writer.keys]
        sums = [checksum(data) for data in datas]
        call = (writer.tenant, writer.session_id, writer.token, writer.committed)
        window = sums[writer.committed : writer.committed + len(keys)]
        if writer.quarantined:
            session = next(s for s in self.sessions if s.session_id == writer.session_id)
            with pytest.raises(NotFound if session.ended else StateConflict):
                self.cache.commit(*call, _sums(window))
            return
        write_blocks(self.node, writer.extents, datas)
        if self.model.epochs[writer.tenant, writer.model_id] != writer.epoch:
            with pytest.raises(StateConflict) as refused:
                self.cache.commit(*call, _sums(window))
            assert refused.value.reason == "NAMESPACE_EPOCH_STALE"
            return
        done = self.cache.commit(*call, _sums(window))
        for key in keys:
            block = self.model.blocks.get(key)
            if block is not None and block.writer == writer.token:
                block.writer = None
        writer.committed += len(keys)
        alive = [key for key in keys if key in self.model.blocks]
        seen = [key for key in alive if self.model.visible(key)]
        assert (done.visible_count, done.waiting_count) == (len(seen), len(alive) - len(seen))
        assert done.dropped_count == len(keys) - len(alive)
        if writer.committed == len(writer.keys):
            del self.model.writers[writer.token]

    @rule(number=pick)
    def abort(self, number: int) -> None:
        writer = self._writer(number)
        if writer is None:
            return
        session = next(s for s in self.sessions if s.session_id == writer.session_id)
        if session.ended:
            return
        self.cache.abort(writer.tenant, writer.session_id, writer.token)
        self.model.end_writer(writer)

    @rule(number=pick)
    def late_writer_scribbles_over_its_old_slots(self, number: int) -> None:
        lost = [w for w in self.model.writers.values() if w.quarantined]
        if lost:
            writer = lost[number % len(lost)]
            size = len(self._data(writer.keys[0]))
            write_blocks(
                self.node, writer.extents[-1:], [b"\xee" * size] * writer.extents[-1].block_count
            ) if (writer.committed == 0) else None

    def _writer(self, number: int) -> Writer | None:
        writers = list(self.model.writers.values())
        return writers[number % len(writers)] if writers else None

    def _data(self, key: Key) -> bytes:
        what = NAMESPACES[key[0], key[1]]
        return block_data(key[4], key[3], what.kv_groups[0].block_bytes)

    # -- reading -------------------------------------------------------------------------------

    @rule(name=namespaces, path=paths, skip=st.integers(0, 3), number=pick)
    def acquire(self, name: tuple[str, str], path: tuple[str, ...], skip: int, number: int) -> None:
        tenant, model_id = name
        session = self.session_of(tenant, number)
        skip = min(skip, len(path) - 1)
        shards = range(NAMESPACES[name].shard_count)
        keys = {shard: self.keys(name, shard, path) for shard in shards}
        hashes = packed([key[4] for key in keys[0]])
        expected = min(self.model.leading_visible(keys[shard]) for shard in shards)
        assert self.cache.lookup(tenant, self.refs[name], hashes).hit_count == expected
        answer = self.cache.acquire(
            tenant, session.session_id, self.refs[name], hashes, skip, tuple(shards), TTL_S
        )
        run = answer.run
        assert run.hit_count == expected
        assert run.hit_count + run.pending_count + run.miss_count == len(path)
        assert (answer.lease is not None) == (expected > skip)
        if answer.lease is None:
            return
        self.model.readers[answer.lease.token] = Reader(
            answer.lease.token,
            tenant,
            session.instance_id,
            model_id,
            self.deadline(),
            dict.fromkeys(shards, session.session_id),
            {shard: keys[shard][skip:expected] for shard in shards},
        )
        for part in answer.shard_extents:
            self._read(part.extents, keys[part.shard][skip:expected], skip)

    def _read(self, extents: tuple[Extent, ...], keys: list[Key], first: int) -> list[int]:
        """Copies and verifies like an engine: good bytes are the writer's; the bad ones were scribbled on."""
        bad = []
        index = first
        for extent in extents:
            assert extent.first_block == index
            for at in range(extent.block_count):
                key = keys[index - first]
                data = self._data(key)
                seen = bytes(self.node.view(extent, at, len(data)))
                assert extent.checksums is not None
                if checksum(seen) == int(extent.checksums[at]):
                    assert seen == data, "wrong bytes with a right checksum"
                else:
                    assert self.model.blocks[key].scribbled, "a block that nobody scribbled on is torn"
                    bad.append(index)
                index += 1
        assert index - first == len(keys)
        return bad

    @rule(number=pick, worker=pick, shard=st.integers(0, 1))
    def redeem(self, number: int, worker: int, shard: int) -> None:
        reader = self._reader(number)
        if reader is None:
            return
        session = self.session_of(reader.tenant, worker)
        call = (reader.tenant, session.session_id, reader.token, shard)
        gone = any(key not in self.model.blocks for key in reader.keys.get(shard, []))
        if session.instance_id != reader.instance_id or shard not in reader.shards or gone:
            with pytest.raises(NotFound):
                self.cache.redeem(*call)
            return
        answer = self.cache.redeem(*call)
        reader.shards[shard] = session.session_id
        first = answer.shard_extents[0].extents[0].first_block
        self._read(answer.shard_extents[0].extents, reader.keys[shard], first)

    @rule(number=pick, some=st.booleans())
    def release(self, number: int, some: bool) -> None:
        reader = self._reader(number)
        if reader is None:
            return
        session = next(
            (
                s
                for s in self.sessions
                if not s.ended and (s.tenant, s.instance_id) == (reader.tenant, reader.instance_id)
            ),
            None,
        )
        if session is None:
            return
        shards = tuple(reader.shards)[:1] if some else ()
        bad = self._bad_of(reader)
        entry = LeaseRelease(
            reader.token, shards, tuple(BadBlock(shard, 0, index) for shard, index, _ in bad)
        )
        released, confirmed = self.node.run(self.cache.release(reader.tenant, session.session_id, [entry]))
        assert released == 1
        gone: set[Key] = set()
        expected = 0
        for _, _, key in bad:
            if key in self.model.blocks and key not in gone:
                expected += 1
                gone |= self.model.forget(key)
        assert confirmed == expected
        for shard in shards or list(reader.shards):
            reader.shards.pop(shard, None)
        if not reader.shards:
            del self.model.readers[reader.token]

    def _bad_of(self, reader: Reader) -> list[tuple[int, int, Key]]:
        """(shard, index in the run, key) of leased blocks that were scribbled on."""
        bad = []
        for shard in reader.shards:
            for key in reader.keys[shard]:
                block = self.model.blocks.get(key)
                if block is not None and block.scribbled:
                    depth = 0
                    at = block.parent
                    while at is not None:
                        depth += 1
                        at = self.model.blocks[at].parent
                    bad.append((shard, depth, key))
        return bad

    @rule(number=pick)
    def a_process_scribbles_over_a_kept_block(self, number: int) -> None:
        kept = sorted(k for k in self.model.blocks if self.model.visible(k))
        if not kept:
            return
        key = kept[number % len(kept)]
        tenant, model_id, _, shard, block_hash = key
        info = self.cache.describe(tenant, self.refs[tenant, model_id], shard, 0, packed([block_hash]))
        assert info is not None
        (copy,) = info.copies
        extent = Extent(Tier.DRAM, copy.segment_id, copy.offset_bytes, 0, 0, 1)
        view = self.node.view(extent, 0, 16)
        view[:] = bytes(255 - byte for byte in self._data(key)[:16])
        self.model.blocks[key].scribbled = True

    def _reader(self, number: int) -> Reader | None:
        readers = list(self.model.readers.values())
        return readers[number % len(readers)] if readers else None

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


def _sums(values: list[int]) -> Checksums:
    return np.array(values, dtype=np.uint64)


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(
    max_examples=120,
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
