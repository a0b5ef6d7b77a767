"""Rules of readers: acquire, redeem, release with bad blocks, and bytes that rot."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from prefixd_server.base.errors import NotFound
from prefixd_server.base.types import (
    BadBlock,
    Extent,
    LeaseRelease,
    Tier,
)

from tests.model.ground import NAMESPACES, TTL_S, Ground, namespaces, paths, pick
from tests.model.plain_model import Key, Reader
from tests.support.node import checksum, packed


class ReadingRules(Ground):
    """See the module."""

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
