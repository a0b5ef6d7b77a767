"""Who has a segment of DRAM gets others', too, while they are worth less; two that are active keep theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice, pairwise
from pathlib import Path

import pytest
from prefixd_server.base.types import LeaseRelease, Tier
from prefixd_server.cache.rebalancing import KEPT_AT_LEAST_S

from tests.support import nvme_node
from tests.support.engine import Engine
from tests.support.node import MIB, Node, start_node
from tests.support.specs import spec

RUN_LENGTH = 4
SEGMENT_COUNT = 16
LARGE_BYTES = 1 << 17
IDLE_S = 3600.0
STEP_S = 0.25


@pytest.fixture
def node() -> Iterator[Node]:
    started = start_node(dram_bytes=SEGMENT_COUNT * 2 * MIB, tenants=("red", "blue"))
    yield started
    assert started.cache.check() == []
    started.close()


def engine_of(node: Node, tenant: str = "red", block_bytes: int = LARGE_BYTES) -> Engine:
    ref = node.cache.open_namespace(tenant, spec(block_bytes=block_bytes))
    return Engine(node, node.open_session(tenant, f"{tenant} {block_bytes}"), ref, block_bytes)


def segments_of(engine: Engine) -> list[int]:
    """The segments of DRAM that serve the engine's tenant and block size."""
    catalog = engine.node.cache.state.catalog
    pool = catalog.namespaces.pool(engine.tenant, engine.block_bytes)
    return sorted(catalog.slots[Tier.DRAM].segments_of(pool))


def put(engine: Engine, *names: object) -> list[bytes]:
    """Stores one run, and lets the background work that it causes end."""
    hashes = engine.put(names, *range(1, RUN_LENGTH))
    engine.node.clock.advance(STEP_S)
    engine.node.run(asyncio.sleep(0))
    return hashes


def put_many(engine: Engine, count: int, name: str = "many") -> list[list[bytes]]:
    return [put(engine, name, number) for number in range(count)]


def hand_overs(engines: list[Engine], turns: Iterator[Engine]) -> int:
    """Segments that change hands while the engines take these turns."""
    held = [[segments_of(engine) for engine in engines]]
    for number, engine in enumerate(turns):
        put(engine, "turn", number)
        held.append([segments_of(engine) for engine in engines])
    return sum(
        len(set(after) - set(before))
        for earlier, later in pairwise(held)
        for before, after in zip(earlier, later, strict=True)
    )


@pytest.mark.parametrize("policy", ["importance", "lru"])
@pytest.mark.parametrize("tenant", ["red", "blue"], ids=["another block size", "another tenant"])
def test_a_model_that_comes_after_an_idle_one_gets_its_segments_run_by_run(
    node: Node, tenant: str, policy: str
) -> None:
    node.cache.state.policy = node.cache.state.policies[policy]
    old = engine_of(node, block_bytes=65_536)
    put_many(old, 200)
    assert len(segments_of(old)) == SEGMENT_COUNT
    node.clock.advance(IDLE_S)
    new = engine_of(node, tenant)
    runs = put_many(new, 100)
    assert len(segments_of(new)) == SEGMENT_COUNT
    kept = SEGMENT_COUNT * 2 * MIB // LARGE_BYTES // RUN_LENGTH
    assert sum(new.hits(hashes) == len(hashes) for hashes in runs) > kept * 0.9


def test_above_nvme_a_model_that_comes_after_an_idle_one_gets_its_segments(tmp_path: Path) -> None:
    node = nvme_node.start(tmp_path, replace(nvme_node.NVME, size_bytes=256 * MIB))
    old = nvme_node.make_engine(node)
    runs = nvme_node.fill(old, 50)
    assert len(segments_of(old)) == 4
    node.clock.advance(IDLE_S)
    new = engine_of(node)
    while not segments_of(new):
        put(new, "first")
        node.run(nvme_node.settled(node))
    kept = [old.hits(hashes) for hashes in runs]
    for number in range(80):
        put(new, number)
        node.clock.advance(1.0)
        node.run(nvme_node.settled(node))
    assert len(segments_of(new)) == 4
    assert [old.hits(hashes) for hashes in runs] == kept, "a block was lost that NVMe had room for"
    assert node.cache.check() == []
    node.close()


def test_a_model_that_comes_beside_an_active_one_gets_its_share_and_both_keep_it(node: Node) -> None:
    first, second = engine_of(node, block_bytes=65_536), engine_of(node, "blue", block_bytes=65_536)
    put_many(first, 200)
    both = [first, second]
    hand_overs(both, islice(cycle(both), 600))
    assert min(len(segments_of(engine)) for engine in both) >= SEGMENT_COUNT // 3
    assert hand_overs(both, islice(cycle(both), 600)) == 0


def test_what_is_used_again_and_again_is_not_taken_for_what_is_used_once(node: Node) -> None:
    steady, busy = engine_of(node, block_bytes=65_536), engine_of(node)
    loved = put_many(steady, 12, "loved")

    def use() -> None:
        for hashes in loved:
            lease = steady.acquire(hashes).lease
            assert lease is not None
            node.run(node.cache.release("red", steady.session.session_id, [LeaseRelease(lease.token)]))

    for number in range(200):
        put(steady, "once", number)
        use()
    for number in range(300):
        put(busy, "once", number)
        use()
    assert len(segments_of(busy)) > SEGMENT_COUNT // 2
    assert [steady.hits(hashes) for hashes in loved] == [RUN_LENGTH] * len(loved)


def test_models_that_take_turns_have_few_segments_emptied_for_each_other(node: Node) -> None:
    both = [engine_of(node, block_bytes=65_536), engine_of(node, "blue", block_bytes=65_536)]
    put_many(both[0], 200)
    turns = [engine for engine in both for _ in range(int(KEPT_AT_LEAST_S / 2 / STEP_S))]
    hand_overs(both, islice(cycle(turns), 4 * len(turns)))
    moved = hand_overs(both, islice(cycle(turns), 4 * len(turns)))
    assert moved <= SEGMENT_COUNT, "eight turns, and all that is taken is taken back"
