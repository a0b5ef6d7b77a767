"""A full store makes room for another block size and another tenant."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefixd_server.base.config import MoverConfig
from prefixd_server.base.types import LeaseRelease, Tier
from prefixd_server.cache.conservative import Setting
from prefixd_server.cache.rebalancing import FIRST_USE_WITHIN_S
from prefixd_server.cache.sessions import SegmentsRetiredNotice
from prefixd_server.catalog.events import CopyFoundBad
from prefixd_server.media.movers import CallJob

from tests.cache.conftest import MakeEngine
from tests.support import nvme_node
from tests.support.engine import Engine, slot_counts
from tests.support.node import MIB, Node, block_data, chain, checksum, packed, read_blocks
from tests.support.specs import spec

SYSTEM = ("system", 0, 1)
CONVERSATION_COUNT = 30


def fill(engine: Engine, run_length: int = 4) -> list[list[bytes]]:
    """Puts runs until the first eviction; their hashes, oldest first."""
    runs: list[list[bytes]] = []
    while engine.node.cache.stats(engine.tenant).counters.evicted == 0:
        runs.append(engine.put("fill", len(runs), *range(run_length)))
        engine.node.clock.advance(0.01)
    return runs


def admitted(node: Node, engine: Engine, hashes: list[bytes]) -> bool:
    """Whether a run is admitted after the background work that its first try has started."""
    if engine.reserve(hashes).lease is not None:
        return True
    node.run(asyncio.sleep(0))
    return engine.reserve(hashes).lease is not None


def test_a_second_block_size_is_admitted_into_a_full_store(engine: MakeEngine, node: Node) -> None:
    fill(engine())
    assert admitted(node, engine(what=spec("large", block_bytes=1 << 20)), chain("big"))


def test_a_second_tenant_is_admitted_into_a_full_store_with_fresh_memory(
    engine: MakeEngine, node: Node
) -> None:
    red = engine()
    fill(red)
    before = set(node.cache.room.segment_ids)
    blue = engine(tenant="blue")
    assert admitted(node, blue, chain("mine"))
    renewed = [s for s in node.cache.room.segment_ids if s not in before]
    assert len(renewed) == 1
    notice = red.session.outbox.get_nowait()
    assert isinstance(notice, SegmentsRetiredNotice)
    assert len(notice.segment_ids) == 1
    (extent,) = blue.reserve(chain("other")).extents
    assert extent.segment_id == renewed[0]
    assert bytes(node.view(extent, 0, 65_536)) == bytes(65_536), "another tenant's bytes are readable"


def test_two_newcomers_do_not_take_each_others_segment(engine: MakeEngine, node: Node) -> None:
    fill(engine())
    newcomers = [
        engine(what=spec("large", block_bytes=1 << 20)),
        engine(tenant="blue", what=spec("huge", block_bytes=1 << 19)),
    ]
    assert [newcomer.reserve(chain("mine")).lease for newcomer in newcomers] == [None, None]
    node.run(asyncio.sleep(0))
    assert all(newcomer.reserve(chain("mine")).lease is not None for newcomer in newcomers)


def test_a_segment_that_nobody_comes_to_use_is_free_to_take(engine: MakeEngine, node: Node) -> None:
    full = engine()
    runs = fill(full)
    gone = engine(what=spec("large", block_bytes=1 << 20))
    assert gone.reserve(chain("never")).lease is None
    node.run(asyncio.sleep(0))
    kept = sum(full.hits(hashes) for hashes in runs)
    node.clock.advance(FIRST_USE_WITHIN_S)
    assert admitted(node, engine(what=spec("huge", block_bytes=1 << 19)), chain("mine"))
    assert sum(full.hits(hashes) for hashes in runs) == kept, "a block was lost for an empty segment's sake"


def test_what_is_used_most_survives_the_emptying(engine: MakeEngine, node: Node) -> None:
    one = engine()
    runs = fill(one)
    loved = runs[-8:]
    for hashes in loved:
        answer = one.acquire(hashes)
        assert answer.lease is not None
        node.run(node.cache.release("red", one.session.session_id, [release_of(answer.lease.token)]))
    assert admitted(node, engine(what=spec("large", block_bytes=1 << 20)), chain("big"))
    assert [one.hits(hashes) for hashes in loved] == [len(hashes) for hashes in loved]


def test_moved_blocks_keep_their_bytes(engine: MakeEngine, node: Node) -> None:
    one = engine()
    runs = fill(one)
    assert admitted(node, engine(what=spec("large", block_bytes=1 << 20)), chain("big"))
    kept = 0
    for hashes in runs:
        answer = one.acquire(hashes)
        for part in answer.shard_extents:
            for key, (data, given) in zip(hashes, read_blocks(node, part.extents, 65_536), strict=False):
                assert data == block_data(key, 0, 65_536)
                assert checksum(data) == given
                kept += 1
    assert kept > 0
    assert node.cache.state.catalog.slots[Tier.DRAM].check() == []


def test_a_damaged_block_is_forgotten_and_its_neighbours_are_moved(engine: MakeEngine, node: Node) -> None:
    one = engine()
    loved = fill(one)[-8:]
    for hashes in loved:
        answer = one.acquire(hashes)
        assert answer.lease is not None
        (part,) = answer.shard_extents
        extent = next(e for e in part.extents if e.first_block <= 1 < e.first_block + e.block_count)
        node.view(extent, 1 - extent.first_block, 65_536)[:8] = b"scribble"
        node.run(node.cache.release("red", one.session.session_id, [release_of(answer.lease.token)]))
    assert admitted(node, engine(what=spec("large", block_bytes=1 << 20)), chain("big"))
    # What was moved was verified: the damaged block and those behind it are gone, the first is not.
    assert set(map(one.hits, loved)) <= {1, len(loved[0])}
    moved = [hashes for hashes in loved if one.hits(hashes) == 1]
    assert moved
    for hashes in moved:
        ((data, _),) = read_blocks(node, one.acquire(hashes).shard_extents[0].extents, 65_536)
        assert data == block_data(hashes[0], 0, 65_536)


@pytest.fixture
def small_node(tmp_path: Path) -> Iterator[Node]:
    """One DRAM segment above NVMe, which has all that is stored: conversations below one system prompt."""
    node = nvme_node.start(tmp_path, dram_bytes=2 * MIB)
    one = nvme_node.make_engine(node)
    for number in range(CONVERSATION_COUNT):
        one.put(*SYSTEM, number, *range(4))
        node.run(nvme_node.settled(node))
    yield node
    assert node.cache.check() == []
    node.close()


def conversations() -> list[list[bytes]]:
    return [chain(*SYSTEM, number, *range(4)) for number in range(CONVERSATION_COUNT)]


def give_away(node: Node) -> bool:
    """Another block size asks for the one segment; whether it gets it."""
    ref = node.cache.open_namespace("red", spec("large", block_bytes=1 << 20))
    return admitted(node, Engine(node, node.open_session("red", "two"), ref, 1 << 20), chain("big"))


def test_what_nvme_has_stays_there_when_its_segment_is_given_away(small_node: Node) -> None:
    one = nvme_node.make_engine(small_node, "reader")
    before = nvme_node.stored(small_node)
    assert before > 4 * CONVERSATION_COUNT
    assert give_away(small_node)
    assert nvme_node.stored(small_node) == before
    found = sum(one.hits(hashes) - len(SYSTEM) for hashes in conversations())
    assert len(SYSTEM) + found == before, "what is stored is not all to be found"


def test_a_last_copy_that_finds_no_place_goes_after_what_hangs_below_it(small_node: Node) -> None:
    one = nvme_node.make_engine(small_node, "reader")
    # Nor does NVMe take it again: a block that is being read keeps its segment.
    small_node.cache.migration.set_conservative(Setting.ON)
    catalog = small_node.cache.state.catalog
    segment, slot = nvme_node.place_of(one, chain(*SYSTEM)[-1])
    bad = CopyFoundBad(Tier.NVME, segment * catalog.slots[Tier.NVME].stride + slot)
    small_node.cache.state.apply(bad)
    assert give_away(small_node)
    assert {one.hits(hashes) for hashes in conversations()} == {len(SYSTEM) - 1}


def test_a_pinned_block_keeps_its_segment_with_all_that_is_there(small_node: Node) -> None:
    one = nvme_node.make_engine(small_node, "reader")
    small_node.cache.pin("red", one.ref, packed(chain(*SYSTEM)), True)
    slots = small_node.cache.state.catalog.slots[Tier.DRAM]
    before = slots.counts()
    assert not give_away(small_node)
    assert slots.counts() == before


@contextmanager
def busy_movers(node: Node) -> Iterator[None]:
    """The movers have as many jobs as they take, and finish none before the end."""
    gate, limits = threading.Event(), MoverConfig()
    movers = node.cache.state.movers
    count = limits.thread_count + limits.queue_limit
    jobs = [node.loop.create_task(movers.run(CallJob(gate.wait))) for _ in range(count)]
    node.run(asyncio.sleep(0))
    assert movers.depth == count
    try:
        yield
    finally:
        gate.set()
        node.loop.run_until_complete(asyncio.wait(jobs))


@pytest.mark.parametrize("dropped", [False, True], ids=["copying", "renewing"])
def test_while_the_movers_are_busy_no_segment_is_emptied_and_afterwards_it_is(
    engine: MakeEngine, node: Node, dropped: bool
) -> None:
    red = engine()
    fill(red)
    if dropped:
        node.run(node.cache.drop_namespace("red", red.ref))
        node.clock.advance(FIRST_USE_WITHIN_S)
    blue = engine(tenant="blue")
    with busy_movers(node):
        assert not admitted(node, blue, chain("mine"))
        node.cache.raise_if_broken()
        assert slot_counts(node)[1] == 0, "slots stay reserved for copies that nobody makes"
        assert node.cache.check() == []
    assert admitted(node, blue, chain("mine"))


def release_of(token: bytes) -> LeaseRelease:
    return LeaseRelease(token)
