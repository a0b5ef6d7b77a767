"""Rules of writers: reserve, commit, abort, and writers that come too late."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from prefixd_server.base.errors import NotFound, StateConflict
from prefixd_server.base.types import (
    Checksums,
    Extent,
    LeaseGrant,
    ReserveOutcome,
)
from prefixd_server.cache.sessions import Session

from tests.model.ground import NAMESPACES, TTL_S, Ground, namespaces, paths, pick
from tests.model.plain_model import Block, Key, Writer, places
from tests.support.node import checksum, packed, write_blocks


class WritingRules(Ground):
    """See the module."""

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


def _sums(values: list[int]) -> Checksums:
    return np.array(values, dtype=np.uint64)
