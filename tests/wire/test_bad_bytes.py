"""Wrong sessions, wrong bytes, garbage and scribbling over the real wire: each is refused or a miss.

Against a real daemon in this process: real sockets, real memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.rpc.seat import companion_path

from tests.support.daemon import running_daemon, serving
from tests.support.node import chain
from tests.support.wire import raw_call, refusal_of
from tests.support.wire_engine import put_messages, wire_engine
from tests.wire.scene import BLOCK_BYTES, BLOCKS, HASHES, Code, Scene, give_back


async def test_a_session_without_companion_cannot_reserve() -> None:
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path, attach=False) as engine:
        ref = await engine.open_namespace()
        refusal = await engine.refused(
            "Reserve", session_id=engine.session_id, namespace=ref, block_hashes=HASHES
        )
        assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "COMPANION_MISSING")


async def test_a_session_must_say_hello_first(scene: Scene) -> None:
    stream = scene.engine.cache.OpenSession()
    await stream.write(wire.OpenSessionRequest(heartbeat=wire.SessionHeartbeat()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert refusal_of(caught.value).reason == "HELLO_MISSING"


async def put_refused(scene: Scene, *messages: wire.PutRequest) -> str:
    """The reason of a refused Put."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scene.engine.put(*messages)
    refusal = refusal_of(caught.value)
    assert refusal.code is Code.INVALID_ARGUMENT
    return refusal.reason


async def test_a_put_with_bytes_too_few_or_too_many_or_wrong_is_refused(scene: Scene) -> None:
    header, block, *_ = put_messages(scene.ref, HASHES, BLOCKS)
    short = wire.PutRequest(block=wire.PutBlock(block_hash=HASHES[0], checksum=1, data=BLOCKS[0][1:]))
    (fresh,) = chain("fresh")
    wrong = wire.PutRequest(block=wire.PutBlock(block_hash=fresh, checksum=1, data=BLOCKS[0]))
    unsummed = wire.PutRequest(block=wire.PutBlock(block_hash=HASHES[0], data=BLOCKS[0]))
    assert await put_refused(scene, header, short) == "DATA_TOO_SHORT"
    assert await put_refused(scene, header, short, block) == "DATA_TOO_SHORT"
    assert await put_refused(scene, header, short, wire.PutRequest(data=b"xx")) == "DATA_TOO_LONG"
    assert await put_refused(scene, header, block, wire.PutRequest(data=b"x")) == "BLOCK_NOT_STARTED"
    assert await put_refused(scene, header, wrong) == "CHECKSUM_MISMATCH"
    assert await put_refused(scene, header, unsummed) == "CHECKSUM_MISSING"
    assert await put_refused(scene, header) == "EMPTY_RUN"
    assert await put_refused(scene, block) == "HEADER_MISSING"
    assert await put_refused(scene) == "HEADER_MISSING"
    assert await put_refused(scene, header, header) == "HEADER_REPEATED"


async def test_a_deadline_of_zero_does_nothing(scene: Scene) -> None:
    request = wire.AcquireRequest(
        session_id=scene.engine.session_id, namespace=scene.ref, block_hashes=HASHES
    )
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    asked = scene.daemon.cache.stats(None).counters.asked
    method = "/prefixd.v1.CacheService/Acquire"
    await in_thread(raw_call, scene.socket, method, "0m", request.SerializeToString())
    assert scene.daemon.cache.stats(None).counters.asked == asked


async def in_thread(call: Any, *arguments: Any) -> Any:
    """Runs a blocking call beside the loop that serves it."""
    return await asyncio.to_thread(call, *arguments)


async def test_a_message_over_the_limit_is_refused_with_the_remedy(scene: Scene) -> None:
    refusal = await scene.engine.refused("Lookup", namespace=scene.ref, block_hashes=[b"x" * (17 << 20)])
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    assert "shorter runs" in refusal.message


GARBAGE = [b"\0" * 100, b"\xff" * 70_000, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)]


@pytest.mark.parametrize("data", GARBAGE)
async def test_garbage_on_the_grpc_socket_harms_nobody(scene: Scene, data: bytes) -> None:
    await in_thread(send_garbage, scene.socket, socket.SOCK_STREAM, data)
    assert await in_thread(serving, scene.socket) is True


@pytest.mark.parametrize(
    "data", [*GARBAGE, b"{}", b'{"session": 5}', b'{"session": "zz"}', b"[" * 10_000, b"null"]
)
async def test_garbage_on_the_companion_socket_harms_nobody(scene: Scene, data: bytes) -> None:
    await in_thread(send_garbage, companion_path(scene.socket), socket.SOCK_SEQPACKET, data)
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    assert await scene.engine.lookup_counts(scene.ref, HASHES) == (4, 0, 0)


def send_garbage(path: Path, kind: int, data: bytes) -> None:
    """Sends bytes and reads until the other side hangs up or says nothing more."""
    with socket.socket(socket.AF_UNIX, kind) as connection:
        connection.settimeout(0.5)
        connection.connect(str(path))
        try:
            connection.send(data)
            while connection.recv(65_536):
                continue
        except OSError:
            return


async def test_a_client_can_neither_shrink_nor_grow_a_segment(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    extent = (await scene.engine.acquire(scene.ref, HASHES)).shard_extents[0].extents[0]
    assert scene.engine.companion is not None
    answer, fd = await in_thread(scene.engine.companion.segment, extent.segment_id)
    try:
        for length in (0, answer["length_bytes"] - 4096, answer["length_bytes"] + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        assert os.fstat(fd).st_size == answer["length_bytes"]
    finally:
        os.close(fd)
    assert await scene.engine.get(scene.ref, HASHES) == BLOCKS
    await release_all(scene)


async def release_all(scene: Scene) -> None:
    """Ends the engine's session, and with it every read lease."""
    await scene.engine.close()
    async with wire_engine(scene.socket, "sentinel") as sentinel:
        while (await sentinel.call("ListLeases")).leases:
            continue


async def test_a_client_that_scribbles_over_a_segment_makes_misses_and_nothing_else(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    read = await scene.engine.acquire(scene.ref, HASHES)
    (extent,) = read.shard_extents[0].extents
    memory = await scene.engine.memory(extent.segment_id)
    offset = extent.offset_bytes + 2 * extent.stride_bytes
    memory[offset : offset + BLOCK_BYTES] = os.urandom(BLOCK_BYTES)
    assert await scene.engine.read([extent], BLOCK_BYTES) == [*BLOCKS[:2], b"", BLOCKS[3]]

    bad = wire.BadBlock(block_index=2)
    released = await scene.engine.call(
        "Release",
        session_id=scene.engine.session_id,
        releases=[wire.LeaseRelease(token=read.lease.token, bad_blocks=[bad])],
    )
    assert (released.released_count, released.confirmed_bad_count) == (1, 1)
    assert await scene.engine.lookup_counts(scene.ref, HASHES) == (2, 0, 2)
    assert await scene.engine.get(scene.ref, HASHES) == BLOCKS[:2]
    assert scene.daemon.cache.stats(None).counters.bad == 1
    # The bad slot waits for the one process that has it mapped; the session's end without death keeps it.
    assert scene.daemon.cache.stats(None).tiers[0].quarantined_slot_count == 1
    assert scene.engine.companion is not None
    scene.daemon.cache.companions.process_dead(scene.engine.session_id)


async def test_a_portable_get_never_hands_out_scribbled_bytes(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    read = await scene.engine.acquire(scene.ref, HASHES)
    (extent,) = read.shard_extents[0].extents
    memory = await scene.engine.memory(extent.segment_id)
    memory[extent.offset_bytes + extent.stride_bytes] ^= 1
    assert await scene.engine.get(scene.ref, HASHES) == BLOCKS[:1]
    await give_back(scene, read=read.lease.token)
    scene.daemon.cache.companions.process_dead(scene.engine.session_id)


async def test_reports_of_a_wrong_form_are_refused(scene: Scene) -> None:
    session = {"session_id": scene.engine.session_id}
    assert (await scene.engine.refused("ReportUsage", **session)).reason == "FIELD_INVALID"
    nameless = wire.UsageReport(namespace=scene.ref, phase=wire.REQUEST_PHASE_QUEUED)
    assert (
        await scene.engine.refused("ReportUsage", reports=[nameless], **session)
    ).reason == "FIELD_INVALID"


async def test_pins_and_eviction_of_what_is_not_kept_count_nothing(scene: Scene) -> None:
    assert (await scene.engine.call("Pin", namespace=scene.ref, block_hashes=HASHES)).pinned_block_count == 0
    assert (
        await scene.engine.call("Evict", namespace=scene.ref, block_hashes=HASHES)
    ).evicted_block_count == 0
