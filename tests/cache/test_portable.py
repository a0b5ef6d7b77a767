"""Whole blocks through the daemon: the same laws as through shared memory."""

from __future__ import annotations

import asyncio

import pytest
from prefixd_server.base.errors import InvalidRequest
from prefixd_server.base.types import NamespaceRef, ReserveOutcome

from tests.cache.conftest import MakeEngine
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
        await stream.aclose()


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
        await stream.aclose()
        return seen

    assert node.run(slow_reader()) == [block_data(key, 0, one.block_bytes) for key in hashes]
