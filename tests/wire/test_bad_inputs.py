"""Every bad input gets its code, its reason and a message with the remedy; nothing leaks.

Against a real daemon in this process: real sockets, real memory. When a test
ends, `check()` is clean (running_daemon sees to it) and no lease is left.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.app.daemon import Daemon
from prefixd_server.rpc.namespace_spec import spec_to_wire
from prefixd_server.rpc.seat import companion_path

from tests.support.daemon import running_daemon, serving
from tests.support.node import chain
from tests.support.specs import spec
from tests.support.wire import raw_call, refusal_of
from tests.support.wire_engine import WireEngine, checksum_of, put_messages, wire_engine

BLOCK_BYTES = 8192
HASHES = chain("a", "b", "c", "d")
BLOCKS = [bytes([index]) * BLOCK_BYTES for index in range(len(HASHES))]
Code = grpc.StatusCode


@dataclass
class Scene:
    """A daemon, an engine with a session, an open namespace."""

    daemon: Daemon
    engine: WireEngine
    ref: types_pb2.NamespaceRef

    @property
    def socket(self) -> Path:
        """The first tenant's socket."""
        return self.daemon.config.socket_path

    def nothing_leaks(self) -> None:
        """No lease and no slot is held, nothing is out of balance."""
        stats = self.daemon.cache.stats(None)
        assert self.daemon.cache.check() == []
        assert stats.lease_count == 0
        assert all(tier.reserved_slot_count == tier.quarantined_slot_count == 0 for tier in stats.tiers)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """The scene, checked at its end."""
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path) as engine:
        made = Scene(daemon, engine, await engine.open_namespace(block_bytes=BLOCK_BYTES))
        yield made
        made.nothing_leaks()


RUN_METHODS = ("Lookup", "Acquire", "Reserve", "Pin", "Unpin", "Evict")


def with_session(scene: Scene, method: str) -> dict[str, Any]:
    """The session id where the method takes one."""
    return {"session_id": scene.engine.session_id} if method in {"Acquire", "Reserve"} else {}


@pytest.mark.parametrize("method", RUN_METHODS)
@pytest.mark.parametrize(
    ("hashes", "reason"),
    [
        ([b"short"], "HASH_LENGTH_MISMATCH"),
        ([HASHES[0], HASHES[1] + b"x"], "HASH_LENGTH_MISMATCH"),
        ([b"x" * 32] * 16_385, "TOO_MANY_HASHES"),
        ([], "EMPTY_RUN"),
    ],
)
async def test_a_malformed_run_is_refused_by_every_method(
    scene: Scene, method: str, hashes: list[bytes], reason: str
) -> None:
    if method == "Evict" and not hashes:
        assert (await scene.engine.call(method, namespace=scene.ref)).evicted_block_count == 0
        return
    refusal = await scene.engine.refused(
        method, namespace=scene.ref, block_hashes=hashes, **with_session(scene, method)
    )
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, reason)
    assert "block_hashes" in refusal.metadata["field"]
    assert refusal.retry_after_s is None


@pytest.mark.parametrize("method", [*RUN_METHODS, "DropNamespace"])
async def test_an_unknown_namespace_is_not_found_and_the_remedy_is_told(scene: Scene, method: str) -> None:
    run = {} if method == "DropNamespace" else {"block_hashes": HASHES}
    unknown = types_pb2.NamespaceRef(fingerprint=b"?" * 32, epoch=scene.ref.epoch)
    refusal = await scene.engine.refused(method, namespace=unknown, **run, **with_session(scene, method))
    assert (refusal.code, refusal.reason) == (Code.NOT_FOUND, "NAMESPACE_UNKNOWN")
    assert "OpenNamespace" in refusal.message


async def test_a_fingerprint_of_the_wrong_length_is_refused(scene: Scene) -> None:
    refusal = await scene.engine.refused("Lookup", namespace=types_pb2.NamespaceRef(), block_hashes=HASHES)
    assert (refusal.reason, refusal.metadata["field"]) == ("FIELD_INVALID", "namespace.fingerprint")


async def test_a_block_larger_than_a_segment_is_refused(scene: Scene) -> None:
    refusal = await scene.engine.refused("OpenNamespace", spec=spec_to_wire(spec(block_bytes=(2 << 20) + 1)))
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "BLOCK_TOO_LARGE")
    assert "dram.segment" in refusal.message


async def test_another_block_size_or_layout_is_another_namespace_with_nothing_in_it(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    assert await scene.engine.lookup_counts(scene.ref, HASHES) == (4, 0, 0)
    for change in ({"block_bytes": 4096}, {"block_bytes": BLOCK_BYTES, "kv_layout": "other"}):
        other = await scene.engine.open_namespace(**change)
        assert other.fingerprint != scene.ref.fingerprint
        assert await scene.engine.lookup_counts(other, HASHES) == (0, 0, 4)


async def test_a_spec_that_is_not_set_is_refused(scene: Scene) -> None:
    refusal = await scene.engine.refused("OpenNamespace")
    assert (refusal.reason, refusal.metadata["field"]) == ("FIELD_INVALID", "spec")


async def test_a_kv_group_without_the_prefix_law_is_unimplemented(scene: Scene) -> None:
    message = spec_to_wire(spec())
    message.kv_groups[0].kind = types_pb2.KV_GROUP_KIND_SLIDING_WINDOW
    refusal = await scene.engine.refused("OpenNamespace", spec=message)
    assert (refusal.code, refusal.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_KV_GROUP")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"shard": 1}, "SHARD_OUT_OF_RANGE"),
        ({"kv_group": 7}, "KV_GROUP_OUT_OF_RANGE"),
        ({"parent_hash": b"x"}, "HASH_LENGTH_MISMATCH"),
    ],
)
async def test_a_reserve_out_of_range_is_refused(scene: Scene, fields: dict[str, Any], reason: str) -> None:
    fields = {"session_id": scene.engine.session_id, "namespace": scene.ref, "block_hashes": HASHES} | fields
    assert (await scene.engine.refused("Reserve", **fields)).reason == reason


@pytest.mark.parametrize("ttl", [Duration(), Duration(seconds=-1), Duration(seconds=1, nanos=-1)])
async def test_a_time_to_live_that_is_not_positive_is_refused(scene: Scene, ttl: Duration) -> None:
    if ttl.nanos < 0:
        ttl = Duration(seconds=0, nanos=-1)
    for method in ("Acquire", "Reserve"):
        refusal = await scene.engine.refused(
            method, namespace=scene.ref, block_hashes=HASHES, ttl=ttl, session_id=scene.engine.session_id
        )
        assert (refusal.reason, refusal.metadata["field"]) == ("FIELD_INVALID", "ttl")


async def test_a_session_that_is_unknown_or_malformed_is_refused(scene: Scene) -> None:
    run = {"namespace": scene.ref, "block_hashes": HASHES}
    assert (await scene.engine.refused("Acquire", session_id=b"x", **run)).reason == "FIELD_INVALID"
    refusal = await scene.engine.refused("Acquire", session_id=b"x" * 16, **run)
    assert (refusal.code, refusal.reason) == (Code.NOT_FOUND, "SESSION_UNKNOWN")


async def test_a_lease_of_another_instance_cannot_be_redeemed_released_or_committed(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES[:2], BLOCKS[:2])
    read = await scene.engine.acquire(scene.ref, HASHES)
    written = await scene.engine.reserve(scene.ref, HASHES[2:], parent=HASHES[1])
    async with wire_engine(scene.socket, "another") as other:
        mine = {"session_id": other.session_id}
        redeem = await other.refused("Redeem", token=read.lease.token, **mine)
        commit = await other.refused("Commit", token=written.lease.token, checksums=[1, 2], **mine)
        assert redeem.code is commit.code is Code.NOT_FOUND
        assert redeem.reason == commit.reason == "LEASE_UNKNOWN"
        release = await other.call("Release", releases=[wire.LeaseRelease(token=read.lease.token)], **mine)
        assert release.released_count == 0
        assert (await other.refused("Abort", token=written.lease.token, **mine)).reason == "LEASE_UNKNOWN"
    assert len(scene.daemon.cache.list_leases("default")) == 2
    await give_back(scene, read.lease.token, written.lease.token)


async def give_back(scene: Scene, read: bytes = b"", written: bytes = b"") -> None:
    """Ends leases as their holder."""
    session = {"session_id": scene.engine.session_id}
    if read:
        await scene.engine.call("Release", releases=[wire.LeaseRelease(token=read)], **session)
    if written:
        await scene.engine.call("Abort", token=written, **session)


async def test_a_lease_of_another_tenant_looks_like_none_at_all() -> None:
    async with running_daemon("other") as daemon, wire_engine(daemon.config.socket_path) as engine:
        ref = await engine.open_namespace(block_bytes=BLOCK_BYTES)
        await engine.store(ref, HASHES, BLOCKS)
        token = (await engine.acquire(ref, HASHES)).lease.token
        other_socket = daemon.config.tenants[0].socket
        assert other_socket is not None
        async with wire_engine(other_socket) as other:
            foreign = await other.refused("Redeem", session_id=other.session_id, token=token)
            invented = await other.refused("Redeem", session_id=other.session_id, token=b"?" * 16)
            stolen = await other.refused("Redeem", session_id=engine.session_id, token=token)
        assert foreign.reason == "LEASE_UNKNOWN"
        assert (foreign.code, foreign.reason) == (invented.code, invented.reason)
        assert stolen.reason == "SESSION_UNKNOWN"


async def test_committing_twice_is_out_of_order(scene: Scene) -> None:
    reserved = await scene.engine.reserve(scene.ref, HASHES)
    await scene.engine.write(reserved.extents, BLOCKS)
    commit = {
        "session_id": scene.engine.session_id,
        "token": reserved.lease.token,
        "checksums": [checksum_of(block) for block in BLOCKS[:2]],
    }
    assert (await scene.engine.call("Commit", **commit)).visible_count == 2
    refusal = await scene.engine.refused("Commit", **commit)
    assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "COMMIT_OUT_OF_ORDER")
    assert refusal.metadata["expected"] == "2"
    await give_back(scene, written=reserved.lease.token)


async def test_committing_after_the_last_block_finds_no_lease(scene: Scene) -> None:
    reserved = await scene.engine.reserve(scene.ref, HASHES[:1])
    await scene.engine.write(reserved.extents, BLOCKS)
    commit = {
        "session_id": scene.engine.session_id,
        "token": reserved.lease.token,
        "checksums": [checksum_of(BLOCKS[0])],
    }
    await scene.engine.call("Commit", **commit)
    refusal = await scene.engine.refused("Commit", **commit)
    assert (refusal.code, refusal.reason) == (Code.NOT_FOUND, "LEASE_UNKNOWN")


async def test_committing_what_was_not_reserved_is_refused(scene: Scene) -> None:
    session = {"session_id": scene.engine.session_id}
    invented = await scene.engine.refused("Commit", token=b"?" * 16, checksums=[1], **session)
    assert (invented.code, invented.reason) == (Code.NOT_FOUND, "LEASE_UNKNOWN")
    reserved = await scene.engine.reserve(scene.ref, HASHES[:2])
    refusal = await scene.engine.refused("Commit", token=reserved.lease.token, checksums=[1, 2, 3], **session)
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "TOO_MANY_CHECKSUMS")
    await give_back(scene, written=reserved.lease.token)


async def test_a_commit_without_checksums_is_refused(scene: Scene) -> None:
    reserved = await scene.engine.reserve(scene.ref, HASHES[:1])
    refusal = await scene.engine.refused(
        "Commit", session_id=scene.engine.session_id, token=reserved.lease.token
    )
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "CHECKSUM_MISSING")
    await give_back(scene, written=reserved.lease.token)


async def test_a_commit_of_a_dropped_epoch_is_refused_and_its_slots_come_back(scene: Scene) -> None:
    reserved = await scene.engine.reserve(scene.ref, HASHES[:1])
    dropped = await scene.engine.call("DropNamespace", namespace=scene.ref)
    assert dropped.new_epoch == scene.ref.epoch + 1
    refusal = await scene.engine.refused(
        "Commit", session_id=scene.engine.session_id, token=reserved.lease.token, checksums=[1]
    )
    assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "NAMESPACE_EPOCH_STALE")
    assert "OpenNamespace" in refusal.message
    stale = await scene.engine.refused("Lookup", namespace=scene.ref, block_hashes=HASHES)
    assert stale.reason == "NAMESPACE_EPOCH_STALE"
    await give_back(scene, written=reserved.lease.token)


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
