"""Law 1: wrong bytes are a miss, always."""

from __future__ import annotations

import asyncio

import pytest
from prefixd_server.base.types import BadBlock, LeaseRelease, Reserved

from tests.cache.conftest import MakeEngine
from tests.support.busy_movers import JOB_COUNT_MAX, busy
from tests.support.engine import Engine, slot_counts
from tests.support.node import Node, chain
from tests.support.specs import spec


def scribble(node: Node, engine: Engine, hashes: list[bytes], index: int) -> None:
    answer = engine.acquire(hashes)
    assert answer.lease is not None
    (part,) = answer.shard_extents
    for extent in part.extents:
        if extent.first_block <= index < extent.first_block + extent.block_count:
            node.view(extent, index - extent.first_block, 8)[:] = b"scribble"
    report(node, engine, answer.lease.token)


def report(node: Node, engine: Engine, token: bytes, *indexes: int) -> int:
    entry = LeaseRelease(token, (), tuple(BadBlock(0, 0, index) for index in indexes))
    return node.run(node.cache.release(engine.tenant, engine.session.session_id, [entry]))[1]


def test_a_bad_block_that_is_reported_is_forgotten_with_what_hangs_below(
    engine: MakeEngine, node: Node
) -> None:
    one = engine()
    hashes = one.put(*"abcd")
    scribble(node, one, hashes, 1)
    answer = one.acquire(hashes)
    assert answer.lease is not None
    assert report(node, one, answer.lease.token, 1) == 1
    assert one.hits(hashes) == 1
    assert node.cache.stats("red").counters.bad == 1


def test_the_bad_slot_is_held_while_a_process_that_mapped_it_lives(engine: MakeEngine, node: Node) -> None:
    one, two = engine(), engine(instance="two")
    hashes = one.put(*"ab")
    scribble(node, one, hashes, 1)
    answer = one.acquire(hashes)
    assert answer.lease is not None
    report(node, one, answer.lease.token, 1)
    assert slot_counts(node)[3] == 1
    one.dies()
    assert slot_counts(node)[3] == 1
    two.dies()
    assert slot_counts(node)[3] == 0


def test_a_good_block_that_is_reported_stays(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")
    answer = one.acquire(hashes)
    assert answer.lease is not None
    assert report(node, one, answer.lease.token, 0, 1) == 0
    assert one.hits(hashes) == 2
    assert node.cache.stats("red").counters.bad == 0


def test_a_report_about_blocks_outside_the_lease_does_nothing(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")
    answer = one.acquire(hashes)
    assert answer.lease is not None
    assert report(node, one, answer.lease.token, 2, 16_000) == 0


def test_a_forgotten_block_can_be_put_again(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")
    scribble(node, one, hashes, 0)
    answer = one.acquire(hashes)
    assert answer.lease is not None
    report(node, one, answer.lease.token, 0)
    assert one.hits(hashes) == 0
    one.put(*"ab")
    assert one.hits(chain(*"ab")) == 2


@pytest.mark.parametrize("end", ["expiry", "death", "another word"])
def test_a_slot_is_nobody_elses_while_its_block_is_verified(engine: MakeEngine, node: Node, end: str) -> None:
    reader, writer = engine(), engine(instance="two", what=spec("other"))
    hashes = reader.put("a")
    scribble(node, reader, hashes, 0)
    lease = reader.acquire(hashes).lease
    assert lease is not None
    ids = ("red", reader.session.session_id)
    report_bad = node.cache.release(*ids, [LeaseRelease(lease.token, (), (BadBlock(0, 0, 0),))])
    wanted = chain(*range(node.cache.stats(None).tiers[0].capacity_bytes // writer.block_bytes))

    async def end_the_lease() -> None:
        if end == "expiry":
            node.clock.advance(11.0)
            node.cache.step()
        elif end == "death":
            reader.dies()
        else:
            await node.cache.release(*ids, [LeaseRelease(lease.token)])

    async def reserve_all() -> tuple[Reserved, tuple[int, int]]:
        async with busy(node.cache.state.movers):
            reporting = asyncio.ensure_future(report_bad)
            await asyncio.sleep(0)
            await end_the_lease()
            reserved = writer.reserve(wanted)
        return reserved, await reporting

    reserved, (_, confirmed) = node.run(reserve_all())
    assert confirmed == 1
    assert sum(extent.block_count for extent in reserved.extents) == len(wanted) - 1
    assert writer.commit(reserved, wanted[:-1]).visible_count == len(wanted) - 1


def test_a_report_that_finds_no_mover_is_no_verdict_and_the_leases_end(
    engine: MakeEngine, node: Node
) -> None:
    one = engine()
    hashes = one.put(*"ab")
    scribble(node, one, hashes, 0)
    tokens = [acquired.lease.token for _ in range(2) if (acquired := one.acquire(hashes)).lease]
    entries = [LeaseRelease(tokens[0], (), (BadBlock(0, 0, 0),)), LeaseRelease(tokens[1])]

    async def release() -> tuple[int, int]:
        async with busy(node.cache.state.movers, JOB_COUNT_MAX):
            return await node.cache.release("red", one.session.session_id, entries)

    assert node.run(release()) == (2, 0)
    assert node.cache.state.leases.live_count() == 0
    assert one.hits(hashes) == 2
