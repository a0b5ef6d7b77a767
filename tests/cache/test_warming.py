"""Acquire of a run that is partly on NVMe: room for what is brought is not made of the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd_server.base.types import Acquired, Hashes, Rows, Tier
from prefixd_server.cache.worth import by_worth
from prefixd_server.catalog.events import CopiesEvicted, CopiesLeased

from tests.support.engine import Engine
from tests.support.node import Node, packed
from tests.support.nvme_node import start, storage_of
from tests.support.specs import spec

SLOT_COUNT = 32


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = start(tmp_path, dram_bytes=SLOT_COUNT * 65_536)
    yield started
    assert started.cache.check() == []
    started.close()


def rows_of(engine: Engine, hashes: list[bytes]) -> Rows:
    """The blocks of a run, of the engine's shard."""
    catalog = engine.node.cache.state.catalog
    space = catalog.namespaces.space(catalog.namespaces.get("red", engine.ref), engine.shard, 0)
    return catalog.find_prefix(space, packed(hashes))


def copy_down(engine: Engine, hashes: list[bytes]) -> None:
    """The run is on NVMe too."""
    state, rows = engine.node.cache.state, rows_of(engine, hashes)
    keys: Hashes = state.catalog.columns.key[rows].copy()
    space = int(state.catalog.columns.space[rows[0]])
    transfers = storage_of(engine.node).transfers
    assert engine.node.run(transfers.demote(space, keys, by_worth(state, rows)[1], set())) == len(hashes)


def drop(engine: Engine, hashes: list[bytes], first: int) -> None:
    """DRAM has the run's blocks from `first` on no more."""
    rows = rows_of(engine, hashes)[first:][::-1]
    engine.node.cache.state.apply(CopiesEvicted(Tier.DRAM, rows))


def fill_up(engine: Engine) -> None:
    """What was free in DRAM is taken, and leased."""
    state = engine.node.cache.state
    table = state.catalog.slots[Tier.DRAM]
    hashes = engine.put(*(("held", number) for number in range(table.counts().free)))
    state.apply(CopiesLeased(Tier.DRAM, state.catalog.columns.slot[Tier.DRAM][rows_of(engine, hashes)]))
    assert table.counts().free == 0


def acquire(engine: Engine, hashes: list[bytes], shards: tuple[int, ...]) -> Acquired:
    """As a scheduler does, on the loop."""

    async def ask() -> Acquired:
        ids = ("red", engine.session.session_id, engine.ref)
        return engine.node.cache.acquire(*ids, packed(hashes), 0, shards, None)

    return engine.node.run(ask())


def test_what_one_shard_lacks_is_not_brought_at_the_cost_of_what_another_hits(node: Node) -> None:
    ref = node.cache.open_namespace("red", spec("sharded", shard_count=2))
    session = node.open_session("red", "one")
    engines = [Engine(node, session, ref, shard=shard) for shard in range(2)]
    for engine in engines:
        hashes = engine.put(*"abcd")
        copy_down(engine, hashes)
        drop(engine, hashes, 2)
    fill_up(engines[0])
    answer = acquire(engines[0], hashes, (0, 1))
    assert (answer.run.hit_count, answer.run.pending_count) == (2, 2)
    assert [part.extents[0].block_count for part in answer.shard_extents] == [2, 2]


def test_a_hole_is_not_filled_at_the_cost_of_what_is_kept_below_it(node: Node) -> None:
    engine = Engine(node, node.open_session("red", "one"), node.cache.open_namespace("red", spec()))
    upper = engine.put(*"abcde")
    copy_down(engine, upper)
    drop(engine, upper, 4)
    hashes = engine.put(*"abcdefgh")
    fill_up(engine)
    answer = acquire(engine, hashes, (0,))
    assert (answer.run.hit_count, answer.run.pending_count) == (4, 4)
    assert len(rows_of(engine, hashes)) == 8
