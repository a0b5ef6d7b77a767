"""Leases: verified, in order, within their time, ended once; what is abandoned is given back."""

from __future__ import annotations

import gc
from dataclasses import replace

import grpc
import numpy as np
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_client import Client, InvalidArgument, ReserveOutcome
from prefixd_client.copy import checksum_of

from tests.support.clients import PATIENT, data_of, empty, run_of, spec, stored, until
from tests.support.fake_daemon import SLOT_BYTES

RUN = run_of(4)


class Offset:
    """The client's clock, moved forward at will."""

    def __init__(self, client) -> None:
        self._now = client.control.now
        self.seconds = 0.0
        client.control.now = self.now

    def now(self) -> float:
        return self._now() + self.seconds


def scribble(daemon, block_hash: bytes) -> None:
    slot, _ = daemon.blocks[block_hash]
    daemon.memory[slot * SLOT_BYTES + 100] ^= 1


def test_what_is_stored_is_loaded(namespace) -> None:
    data = stored(namespace, RUN)
    targets = empty(4)
    with namespace.acquire(RUN) as lease:
        assert (lease.hit_count, lease.first_block, lease.block_count) == (4, 0, 4)
        assert lease.load(targets) == 4
    assert [bytes(target) for target in targets] == data


def test_the_checksum_is_of_the_engines_memory(daemon, namespace) -> None:
    data = stored(namespace, RUN)
    assert [daemon.blocks[key][1] for key in RUN] == [checksum_of(block) for block in data]


def test_skipped_blocks_are_not_loaded(namespace) -> None:
    data = stored(namespace, RUN)
    targets = empty(2)
    with namespace.acquire(RUN, skip_blocks=2) as lease:
        assert (lease.hit_count, lease.first_block, lease.block_count) == (4, 2, 2)
        assert lease.load(targets) == 2
    assert [bytes(target) for target in targets] == data[2:]


def test_a_lease_is_loaded_in_parts(namespace) -> None:
    data = stored(namespace, RUN)
    targets = empty(4)
    with namespace.acquire(RUN) as lease:
        assert lease.load(targets[:1]) == 1
        assert lease.load(targets[1:3], start=1) == 2
        assert lease.load(targets[3:], start=3) == 1
    assert [bytes(target) for target in targets] == data


def test_a_wrong_byte_is_a_shorter_hit_and_is_reported(daemon, client, namespace) -> None:
    data = stored(namespace, RUN)
    scribble(daemon, RUN[2])
    targets = empty(4)
    with namespace.acquire(RUN) as lease:
        assert lease.load(targets) == 2
    assert [bytes(target) for target in targets[:2]] == data[:2]
    assert bytes(targets[3]) == bytes(4096)
    (release,) = daemon.wait_asked("Release").releases
    (bad,) = release.bad_blocks
    assert (bad.shard, bad.kv_group, bad.block_index) == (0, 0, 2)
    assert client.status().bad_block_count == 1


def test_the_bad_block_is_named_by_its_place_in_the_run(daemon, namespace) -> None:
    stored(namespace, RUN)
    scribble(daemon, RUN[3])
    with namespace.acquire(RUN, skip_blocks=1) as lease:
        assert lease.load(empty(2), start=1) == 1
    assert daemon.wait_asked("Release").releases[0].bad_blocks[0].block_index == 3


def test_a_bad_block_is_told_without_waiting_for_company(daemon) -> None:
    with Client(daemon.path, options=replace(PATIENT, release_batch_pause_s=3600.0)) as client:
        namespace = client.namespace(spec())
        stored(namespace, RUN)
        scribble(daemon, RUN[0])
        namespace.acquire(RUN).release()
        with namespace.acquire(RUN) as lease:
            assert lease.load(empty(4)) == 0
        releases = daemon.wait_asked("Release").releases
        assert [len(release.bad_blocks) for release in releases] == [0, 1]


def test_nothing_is_copied_after_80_percent_of_a_leases_life(daemon, client, namespace) -> None:
    stored(namespace, RUN)
    daemon.heartbeat_s = 3600.0
    daemon.mute_heartbeats.set()
    daemon.lease_s = 1000.0
    lease, write = namespace.acquire(RUN), namespace.reserve(run_of(2, "new"))
    clock = Offset(client)
    clock.seconds = 790.0
    assert lease.load(empty(4)) == 4
    clock.seconds = 801.0
    targets = empty(4)
    assert lease.expired()
    assert lease.load(targets) == 0
    assert targets == empty(4)
    before = bytes(daemon.memory)
    assert write.store(data_of(run_of(2, "new"))).dropped == 2
    assert bytes(daemon.memory) == before
    assert daemon.count("Commit") == 1
    daemon.wait_asked("Abort")


def test_a_held_lease_is_renewed_and_a_released_one_is_not(daemon, client, namespace) -> None:
    stored(namespace, RUN)
    daemon.lease_s = 50.0
    held, released = namespace.acquire(RUN), namespace.acquire(RUN)
    released.release()
    beats = daemon.count("Heartbeat")
    daemon.lease_s = 10_000.0
    renewals = daemon.wait_asked("Heartbeat", beats + 3).renew_tokens
    assert list(renewals) == [held.token]
    clock = Offset(client)
    clock.seconds = 5_000.0
    assert not held.expired()


def test_a_held_lease_is_renewed_however_many_others_end(daemon, client, namespace) -> None:
    stored(namespace, RUN)
    held = namespace.acquire(RUN)

    def answer_when_the_next_waits(request, _context):
        ending = wire.LeaseRelease(token=request.releases[0].token)
        client.control.outbox.end_lease(daemon.boot_id, ending)
        return wire.ReleaseResponse(released_count=1)

    daemon.answers["Release"] = answer_when_the_next_waits
    try:
        namespace.acquire(RUN).release()
        daemon.wait_asked("Release")
        renewed = daemon.wait_asked("Heartbeat", daemon.count("Heartbeat") + 2).renew_tokens
    finally:
        del daemon.answers["Release"]
    assert list(renewed) == [held.token]


@pytest.mark.parametrize("method", ["Abort", "Release"])
def test_an_ending_that_the_daemon_has_no_room_for_is_sent_again(daemon, namespace, method) -> None:
    stored(namespace, RUN)
    daemon.refuse(method, grpc.StatusCode.RESOURCE_EXHAUSTED, "MOVERS_BUSY")
    end = namespace.reserve(run_of(1, "new")).abort if method == "Abort" else namespace.acquire(RUN).release
    end()
    first = daemon.wait_asked(method)
    del daemon.answers[method]
    assert daemon.wait_asked(method, 2) == first


def test_a_lease_that_the_daemon_lost_is_not_used(daemon, namespace) -> None:
    stored(namespace, RUN)
    lease = namespace.acquire(RUN)
    daemon.lost_tokens = [lease.token]
    until(lease.expired)
    assert lease.load(empty(4)) == 0


def test_releasing_twice_tells_the_daemon_once(daemon, namespace) -> None:
    stored(namespace, RUN)
    first, second = namespace.acquire(RUN), namespace.acquire(RUN)
    first.release()
    first.release()
    daemon.wait_asked("Release")
    second.release()
    until(lambda: second.token in released(daemon))
    assert released(daemon) == [first.token, second.token]


def released(daemon) -> list[bytes]:
    requests = [request for method, request in daemon.asked if method == "Release"]
    return [release.token for request in requests for release in request.releases]


def test_a_lease_ends_for_the_shards_that_were_asked_for_or_for_all(daemon, client) -> None:
    namespace = client.namespace(spec(shard_count=2))
    stored(namespace, RUN)
    one, none, every = (namespace.acquire(RUN, shards=shards) for shards in ((1,), (), (0,)))
    for lease in (one, none):
        lease.release()
    every.release(all_shards=True)
    until(lambda: len(released(daemon)) == 3)
    requests = [request for method, request in daemon.asked if method == "Release"]
    shards = {release.token: list(release.shards) for request in requests for release in request.releases}
    assert [shards[lease.token] for lease in (one, none, every)] == [[1], [], []]


def test_a_lease_that_is_handed_over_is_neither_renewed_nor_released(daemon, namespace) -> None:
    stored(namespace, RUN)
    lease = namespace.acquire(RUN, shards=())
    token = lease.hand_over()
    assert token == lease.token
    del lease
    marker = namespace.acquire(RUN)
    marker.release()
    until(lambda: marker.token in released(daemon))
    assert token not in released(daemon)
    assert token not in daemon.wait_asked("Heartbeat", daemon.count("Heartbeat") + 2).renew_tokens


def test_leases_that_are_forgotten_are_given_back(daemon, namespace) -> None:
    stored(namespace, RUN)
    token = namespace.acquire(RUN).token
    written = namespace.reserve(run_of(1, "new")).token
    gc.collect()
    until(lambda: token in released(daemon))
    assert daemon.wait_asked("Abort").token == written


def test_only_reserved_blocks_are_stored(daemon, namespace) -> None:
    stored(namespace, RUN[:2])
    lease = namespace.reserve(RUN)
    assert lease.outcomes == (ReserveOutcome.PRESENT,) * 2 + (ReserveOutcome.RESERVED,) * 2
    assert lease.reserved_indexes == [2, 3]
    data = data_of(RUN)
    assert lease.store(data[2:], blocks=[2, 3]).visible == 2
    assert namespace.acquire(RUN).load(empty(4)) == 4


def test_a_run_that_is_kept_whole_reserves_nothing(daemon, namespace) -> None:
    stored(namespace, RUN)
    with namespace.reserve(RUN) as lease:
        assert (lease.reserved_indexes, lease.token, lease.is_held) == ([], b"", False)
        assert lease.store([]) == lease.store([])
    assert daemon.count("Commit") == 1


def test_a_heartbeat_never_renews_what_has_no_token(daemon, client, namespace) -> None:
    stored(namespace, RUN)
    hold = client.control.hold

    def beaten_meanwhile(lease) -> None:
        hold(lease)
        daemon.wait_asked("Heartbeat", daemon.count("Heartbeat") + 2)

    client.control.hold = beaten_meanwhile
    reading, nothing = namespace.acquire(RUN), namespace.reserve(RUN)
    beats = [request for method, request in daemon.asked if method == "Heartbeat"]
    assert {token for beat in beats for token in beat.renew_tokens} == {reading.token}
    assert not nothing.is_held


def test_a_lease_is_stored_in_parts_and_the_rest_is_given_up(daemon, namespace) -> None:
    data = data_of(RUN)
    with namespace.reserve(RUN) as lease:
        assert lease.store(data[:1]).visible == 1
        assert lease.store(data[1:3]).visible == 2
    assert [daemon.wait_asked("Commit", n).committed_before_count for n in (1, 2)] == [0, 1]
    assert daemon.wait_asked("Abort").token == lease.token
    assert namespace.lookup(RUN).hit_count == 3


def test_a_commit_that_is_not_answered_counts_as_dropped(daemon, namespace) -> None:
    daemon.answers["Commit"] = lambda _request, context: context.abort(grpc.StatusCode.INTERNAL, "lost")
    lease = namespace.reserve(RUN)
    assert lease.store(data_of(RUN)).dropped == 4
    assert daemon.wait_asked("Abort").token == lease.token


def test_blocks_of_several_pieces_are_one_block(namespace) -> None:
    source = np.frombuffer(data_of(RUN[:1])[0], dtype=np.uint8)
    assert namespace.reserve(RUN[:1]).store([[source[:1000], source[1000:4000], source[4000:]]]).visible == 1
    target = np.zeros(4096, dtype=np.uint8)
    halves = [target[:2048], (target[2048:].ctypes.data, 2048)]
    assert namespace.acquire(RUN[:1]).load([halves]) == 1
    assert target.tobytes() == source.tobytes()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda lease: lease.load(empty(5)), "targets"),
        (lambda lease: lease.load(empty(1), start=4), "targets"),
        (lambda lease: lease.load(empty(1), shard=1), "shard"),
        (lambda lease: lease.load(empty(1), kv_group=1), "kv_group"),
        (lambda lease: lease.load([bytearray(4095)]), "block"),
        (lambda lease: lease.load([bytes(4096)]), "block"),
        (lambda lease: lease.load([np.zeros((4096, 2), np.uint8)[:, 0]]), "block"),
        (lambda lease: lease.load([(0, 4096)]), "block"),
        (lambda lease: lease.load([42]), "block"),
    ],
)
def test_a_wrong_target_is_named(namespace, call, field) -> None:
    stored(namespace, RUN)
    with namespace.acquire(RUN) as lease, pytest.raises(InvalidArgument) as caught:
        call(lease)
    assert caught.value.field == field


@pytest.mark.parametrize("blocks", [[1, 0], [0, 2], [0]])
def test_other_blocks_than_the_next_are_refused(namespace, blocks) -> None:
    with namespace.reserve(RUN) as lease, pytest.raises(InvalidArgument, match="next reserved"):
        lease.store(data_of(RUN[:2]), blocks=blocks)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda ns: ns.lookup([b"short"]), "hashes"),
        (lambda ns: ns.lookup(["x" * 32]), "hashes"),
        (lambda ns: ns.acquire(RUN, skip_blocks=5), "skip_blocks"),
        (lambda ns: ns.acquire(RUN, shards=(1,)), "shard"),
        (lambda ns: ns.redeem(bytes(16), 1), "shard"),
        (lambda ns: ns.reserve(RUN, parent_hash=b"short"), "parent_hash"),
        (lambda ns: ns.reserve(RUN, kv_group=1), "kv_group"),
        (lambda ns: ns.put([(RUN[0], b"short")]), "data"),
        (lambda ns: ns.get([b"short"]), "hashes"),
    ],
)
def test_a_wrong_argument_is_named(daemon, namespace, call, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(namespace)
    assert caught.value.field == field
    assert not {"Lookup", "Acquire", "Reserve"} & {method for method, _ in daemon.asked}


def test_an_empty_run_asks_nobody(daemon, namespace) -> None:
    assert namespace.lookup([]).hit_count == 0
    assert namespace.acquire([]) is None
    assert namespace.acquire(RUN, skip_blocks=4) is None
    assert namespace.reserve([]) is None
    assert [daemon.count(method) for method in ("Lookup", "Acquire", "Reserve")] == [0, 0, 0]


def test_blocks_beyond_the_limit_of_a_request_are_misses(daemon, client, namespace) -> None:
    client.control.session.opened.hash_count_max = 3
    stored(namespace, RUN[:3])
    run = namespace.lookup(RUN)
    assert (run.hit_count, run.miss_count) == (3, 1)
    assert namespace.acquire(RUN).run == run
    assert namespace.reserve(RUN).outcomes[3:] == (ReserveOutcome.DECLINED,)
