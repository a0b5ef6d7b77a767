"""Two tenants on two sockets: the socket is the identity, and the other tenant might as well not exist."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.app.daemon import Daemon

from tests.support.daemon import DaemonProcess, running_daemon
from tests.support.node import chain
from tests.support.wire import short_directory
from tests.support.wire_engine import WireEngine, put_messages, wire_engine

HASHES = chain("a", "b", "c")
BLOCKS = [bytes([index]) * 4096 for index in range(3)]


@dataclass
class Two:
    """A daemon with two further tenants; alice keeps a run and holds a lease on it, bob has nothing."""

    daemon: Daemon
    alice: WireEngine
    bob: WireEngine
    ref: types_pb2.NamespaceRef


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    """See Two."""
    async with running_daemon("alice", "bob") as daemon:
        alice_socket, bob_socket = (tenant.socket for tenant in daemon.config.tenants)
        assert alice_socket is not None
        assert bob_socket is not None
        async with wire_engine(alice_socket) as alice, wire_engine(bob_socket) as bob:
            ref = await alice.open_namespace(block_bytes=4096)
            await alice.store(ref, HASHES, BLOCKS)
            await alice.acquire(ref, HASHES)
            yield Two(daemon, alice, bob, ref)


NAMED = ("Lookup", "Acquire", "Pin", "Unpin", "Evict", "DescribeBlock", "DropNamespace")


@pytest.mark.parametrize("method", NAMED)
async def test_the_others_namespace_is_answered_as_one_that_never_was(two: Two, method: str) -> None:
    def fields(ref: types_pb2.NamespaceRef) -> dict[str, Any]:
        more: dict[str, Any] = {"block_hash": HASHES[0]} if method == "DescribeBlock" else {}
        if method not in {"DescribeBlock", "DropNamespace"}:
            more = {"block_hashes": HASHES}
        if method == "Acquire":
            more["session_id"] = two.bob.session_id
        return {"namespace": ref} | more

    invented = types_pb2.NamespaceRef(fingerprint=b"?" * 32, epoch=two.ref.epoch)
    foreign = await two.bob.refused(method, **fields(two.ref))
    absent = await two.bob.refused(method, **fields(invented))
    assert foreign.reason == "NAMESPACE_UNKNOWN"
    assert (foreign.code, foreign.reason, foreign.metadata.keys()) == (
        absent.code,
        absent.reason,
        absent.metadata.keys(),
    )
    assert await two.alice.lookup_counts(two.ref, HASHES) == (3, 0, 0)


async def test_the_same_spec_is_another_namespace_with_nothing_in_it(two: Two) -> None:
    mine = await two.bob.open_namespace(block_bytes=4096)
    assert mine.fingerprint == two.ref.fingerprint
    assert await two.bob.lookup_counts(mine, HASHES) == (0, 0, 3)
    assert await two.bob.get(mine, HASHES) == []
    assert not (await two.bob.call("DescribeBlock", namespace=mine, block_hash=HASHES[0])).found
    assert (await two.bob.call("Pin", namespace=mine, block_hashes=HASHES)).pinned_block_count == 0
    assert (await two.bob.call("Evict", namespace=mine)).evicted_block_count == 0
    await two.bob.call("DropNamespace", namespace=mine)
    assert await two.alice.lookup_counts(two.ref, HASHES) == (3, 0, 0)


async def test_each_keeps_its_own_bytes_under_the_same_key(two: Two) -> None:
    mine = await two.bob.open_namespace(block_bytes=4096)
    other_bytes = [block[::-1].replace(b"\1", b"\7") for block in BLOCKS]
    await two.bob.put(*put_messages(mine, HASHES, other_bytes))
    assert await two.bob.get(mine, HASHES) == other_bytes
    assert await two.alice.get(two.ref, HASHES) == BLOCKS


async def test_the_others_segments_are_not_handed_out(two: Two) -> None:
    assert two.bob.companion is not None
    (hers,) = (await two.alice.acquire(two.ref, HASHES)).shard_extents[0].extents
    for segment_id in (hers.segment_id, 999_999):
        answer, fd = await asyncio.to_thread(two.bob.companion.segment, segment_id)
        assert (answer["error"], fd) == ("SEGMENT_UNKNOWN", -1)


async def test_the_others_leases_sessions_and_counters_are_not_seen(two: Two) -> None:
    assert len((await two.alice.call("ListLeases")).leases) == 1
    assert len((await two.bob.call("ListLeases")).leases) == 0
    assert len((await two.bob.call("ListNamespaces")).namespaces) == 0
    stats = await two.bob.call("GetStats")
    assert (stats.block_count, stats.committed_block_count, stats.lease_count) == (0, 0, 0)
    assert stats.session_count == 1
    assert all(tier.slot_count == tier.assigned_bytes == 0 for tier in stats.tiers)


async def test_the_others_lease_cannot_be_released_by_its_token(two: Two) -> None:
    token = (await two.alice.acquire(two.ref, HASHES)).lease.token
    release = wire.LeaseRelease(token=token)
    released = await two.bob.call("Release", session_id=two.bob.session_id, releases=[release])
    assert released.released_count == 0
    assert (await two.bob.heartbeat(token)).lost_tokens == [token]
    assert len((await two.alice.call("ListLeases")).leases) == 2


async def test_only_an_admin_socket_may_concern_the_whole_daemon(two: Two) -> None:
    for method in ("Check", "Drain"):
        refusal = await two.bob.refused(method)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_REQUIRED")
    async with wire_engine(two.daemon.config.socket_path, None) as operator:
        assert (await operator.call("GetStats")).committed_block_count == 3
        assert (await operator.call("Check")).problems == []


AS_ANOTHER_USER = """
import json, os, socket, sys
import grpc
from prefixd.v1 import cache_service_pb2, cache_service_pb2_grpc

own, other, uid, gid = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.setgroups([])
os.setgid(gid)
os.setuid(uid)

def tried(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    except grpc.RpcError as error:
        return error.code().name
    return "reached"

def lookup(path):
    with grpc.insecure_channel(f"unix:{path}") as channel:
        cache_service_pb2_grpc.CacheServiceStub(channel).Lookup(cache_service_pb2.LookupRequest(), timeout=5)

def companion(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path + ".fd")

print(json.dumps({name: [tried(lambda: lookup(path)), tried(lambda: companion(path))]
                  for name, path in (("own", own), ("other", other))}))
"""


def as_user(own: Path, other: Path, uid: int, gid: int) -> dict[str, list[str]]:
    """What a user of that uid and group reaches of the two tenants' sockets."""
    # The interpreter starts as root, since its files may be root's alone, and gives that up at once.
    arguments = [sys.executable, "-c", AS_ANOTHER_USER, str(own), str(other), str(uid), str(gid)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become two other users")
def test_two_users_reach_their_own_sockets_and_not_each_others() -> None:
    groups = [entry for entry in grp.getgrall() if entry.gr_gid not in {0, os.getegid()}][:2]
    with short_directory() as directory:
        directory.chmod(0o755)
        alice, bob = directory / "alice.sock", directory / "bob.sock"
        tenants = [
            f"name={path.stem},socket={path},mode=0660,group={group.gr_name}"
            for path, group in zip((alice, bob), groups, strict=True)
        ]
        with DaemonProcess(directory / "p.sock", "--tenant", tenants[0], "--tenant", tenants[1]):
            for own, other, group, uid in ((alice, bob, groups[0], 12_345), (bob, alice, groups[1], 12_346)):
                reached = as_user(own, other, uid, group.gr_gid)
                assert reached["own"] == ["INVALID_ARGUMENT", "reached"]
                assert reached["other"] == ["UNAVAILABLE", "PermissionError"]
                assert as_user(directory / "p.sock", other, uid, group.gr_gid)["own"][1] == "PermissionError"
