"""Whole blocks through the daemon: the same laws as through shared memory."""

from __future__ import annotations

import asyncio

import pytest
from prefixd_server.base.errors import InvalidRequest, StateConflict
from prefixd_server.base.types import NamespaceRef, ReserveOutcome, Tier

from tests.cache.conftest import MakeEngine
from tests.support.busy_movers import busy
from tests.support.engine import Engine, slot_counts
from tests.support.node import Node, block_data, chain, checksum, packed


async def put(engine: Engine, hashes: list[bytes]) -> list[ReserveOutcome]:
    stream = engine.node.cache.begin_put("red", engine.ref, 0, 0, None)
    outcomes = []
    for key in hashes:
        data = block_data(key, 0, engine.block_bytes)
        outcomes.append(await stream.add(packed([key]), checksum(data), data))
    return outcomes


async def get(engine: Engine, ref: NamespaceRef, hashes: list[bytes]) -> list[bytes]:
    stream = engine.node.cache.begin_get("red", ref, 0, 0, packed(hashes))
    try:
        return [bytes(view) async for _, _, view in stream]
    finally:
        stream.close()


def test_what_was_put_is_got_byte_for_byte(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = chain(*"abc")
    assert node.run(put(one, hashes)) == [ReserveOutcome.RESERVED] * 3
    assert node.run(get(one, one.ref, hashes)) == [block_data(key, 0, one.block_bytes) for key in hashes]
    assert node.cache.list_leases("red") == []


def test_what_is_kept_is_not_stored_twice(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")
    assert node.run(put(one, [*hashes, *chain(*"abc")[2:]])) == [
        ReserveOutcome.PRESENT,
        ReserveOutcome.PRESENT,
        ReserveOutcome.RESERVED,
    ]


def test_bytes_that_do_not_match_their_checksum_are_refused_and_leave_nothing(
    engine: MakeEngine, node: Node
) -> None:
    one = engine()
    (key,) = chain("a")
    stream = node.cache.begin_put("red", one.ref, 0, 0, None)
    data = block_data(key, 0, one.block_bytes)
    with pytest.raises(InvalidRequest) as refused:
        node.run(stream.add(packed([key]), checksum(data) ^ 1, data))
    assert refused.value.reason == "CHECKSUM_MISMATCH"
    assert one.hits([key]) == 0
    assert slot_counts(node)[1:] == (0, 0, 0)


def test_cancelling_a_put_settles_its_slot(engine: MakeEngine, node: Node) -> None:
    one = engine()
    (key,) = chain("a")
    data = block_data(key, 0, one.block_bytes)

    async def cancelled() -> None:
        stream = node.cache.begin_put("red", one.ref, 0, 0, None)
        task = asyncio.ensure_future(stream.add(packed([key]), checksum(data), data))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await node.cache.state.movers.drain()
        await asyncio.sleep(0)

    node.run(cancelled())
    assert slot_counts(node)[1] == 0
    assert one.hits([key]) == 1


def test_a_get_ends_before_a_block_that_turns_out_bad_and_forgets_it(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"abc")
    answer = one.acquire(hashes)
    (part,) = answer.shard_extents
    node.view(part.extents[0], 1, 8)[:] = b"scribble"
    one.loses_its_connection()
    other = engine(instance="two")
    assert node.run(get(other, other.ref, hashes)) == [block_data(hashes[0], 0, one.block_bytes)]
    assert other.hits(hashes) == 1
    assert node.cache.stats("red").counters.bad == 1


def test_blocks_being_got_are_not_evicted(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")

    async def slow_reader() -> list[bytes]:
        stream = node.cache.begin_get("red", one.ref, 0, 0, packed(hashes))
        seen = []
        async for _, _, view in stream:
            for number in range(200):
                one.put("filler", len(seen), number)
            seen.append(bytes(view))
        stream.close()
        return seen

    assert node.run(slow_reader()) == [block_data(key, 0, one.block_bytes) for key in hashes]


def held(node: Node) -> int:
    """Holds on slots in DRAM."""
    return node.cache.state.catalog.slots[Tier.DRAM].lease_total()


def test_a_get_holds_its_blocks_while_its_reader_goes_on_and_no_longer(
    engine: MakeEngine, node: Node
) -> None:
    one = engine()
    hashes = one.put(*"ab")
    stream = node.cache.begin_get("red", one.ref, 0, 0, packed(hashes))

    async def rest() -> list[int]:
        return [index async for index, _, _ in stream]

    for _ in range(3):
        stream.await_reader()
        node.clock.advance(9.0)
        node.cache.step()
        assert held(node) == 2
    node.clock.advance(2.0)
    node.cache.step()
    assert held(node) == 0
    for more in (stream.await_reader, lambda: node.run(rest())):
        with pytest.raises(StateConflict, match="ask again") as refused:
            more()
        assert refused.value.reason == "GET_EXPIRED"
    stream.close()
    assert held(node) == 0


def test_a_get_holds_its_blocks_for_as_long_as_a_mover_looks_at_them(engine: MakeEngine, node: Node) -> None:
    one = engine()
    hashes = one.put(*"ab")
    stream = node.cache.begin_get("red", one.ref, 0, 0, packed(hashes))
    stream.await_reader()

    async def rest() -> list[bytes]:
        return [bytes(view) async for _, _, view in stream]

    async def looked_at_for_long() -> list[bytes]:
        async with busy(node.cache.state.movers):
            reading = asyncio.ensure_future(rest())
            await asyncio.sleep(0)
            node.clock.advance(100.0)
            node.cache.step()
            assert held(node) == 2
        return await reading

    assert node.run(looked_at_for_long()) == [block_data(key, 0, one.block_bytes) for key in hashes]
    stream.close()
