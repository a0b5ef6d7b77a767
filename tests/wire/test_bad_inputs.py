"""Every bad input gets its code, its reason and a message with the remedy; nothing leaks.

Against a real daemon in this process: real sockets, real memory. When a test
ends, `check()` is clean (running_daemon sees to it) and no lease is left.
"""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.rpc.namespace_spec import spec_to_wire

from tests.support.daemon import running_daemon
from tests.support.specs import spec
from tests.support.wire_engine import checksum_of, wire_engine
from tests.wire.scene import BLOCK_BYTES, BLOCKS, HASHES, Code, Scene, give_back

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


async def test_a_token_that_the_caller_chose_names_its_lease_alone(scene: Scene) -> None:
    session, token = {"session_id": scene.engine.session_id}, bytes(range(16))
    reserve = session | {"namespace": scene.ref, "block_hashes": HASHES[:1], "token": token}
    short = await scene.engine.refused("Reserve", **(reserve | {"token": b"short"}))
    assert (short.code, short.reason) == (Code.INVALID_ARGUMENT, "FIELD_INVALID")
    assert (await scene.engine.call("Reserve", **reserve)).lease.token == token
    again = await scene.engine.refused("Reserve", **(reserve | {"block_hashes": HASHES[:2]}))
    assert (again.code, again.reason) == (Code.FAILED_PRECONDITION, "LEASE_TOKEN_USED")
    assert (await scene.engine.call("Abort", token=token, **session)).freed_slot_count == 1
    await give_back(scene)


async def test_an_abort_that_overtakes_its_reserve_wins(scene: Scene) -> None:
    session, token = {"session_id": scene.engine.session_id}, bytes(range(16))
    assert (await scene.engine.call("Abort", token=token, **session)).freed_slot_count == 0
    late = await scene.engine.refused(
        "Reserve", namespace=scene.ref, block_hashes=HASHES, token=token, **session
    )
    assert (late.code, late.reason) == (Code.FAILED_PRECONDITION, "LEASE_TOKEN_USED")
    await give_back(scene)


async def test_a_token_that_was_chosen_for_an_acquire_names_its_lease_alone(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    session, token = {"session_id": scene.engine.session_id}, bytes(range(16))
    acquire = session | {"namespace": scene.ref, "block_hashes": HASHES, "token": token}
    short = await scene.engine.refused("Acquire", **(acquire | {"token": b"short"}))
    assert (short.code, short.reason) == (Code.INVALID_ARGUMENT, "FIELD_INVALID")
    assert (await scene.engine.call("Acquire", **acquire)).lease.token == token
    again = await scene.engine.refused("Acquire", **acquire)
    assert (again.code, again.reason) == (Code.FAILED_PRECONDITION, "LEASE_TOKEN_USED")
    await give_back(scene, read=token)


async def test_a_release_that_overtakes_its_acquire_wins(scene: Scene) -> None:
    await scene.engine.store(scene.ref, HASHES, BLOCKS)
    session, token = {"session_id": scene.engine.session_id}, bytes(range(16))
    release = session | {"releases": [wire.LeaseRelease(token=token)]}
    assert (await scene.engine.call("Release", **release)).released_count == 0
    acquire = session | {"namespace": scene.ref, "block_hashes": HASHES, "token": token}
    late = await scene.engine.refused("Acquire", **acquire)
    assert (late.code, late.reason) == (Code.FAILED_PRECONDITION, "LEASE_TOKEN_USED")


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
