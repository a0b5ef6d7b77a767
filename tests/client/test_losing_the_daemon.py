"""Law 2: a daemon that hangs, dies, drains or comes back is a miss, and comes back by itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_client import Client, DaemonRefused, RunHits

from tests.support.clients import PATIENT, HeldCopies, data_of, empty, is_ready, run_of, spec, stored, until
from tests.support.fake_daemon import SEGMENT_ID, FakeDaemon, fake_daemon

HASTY = replace(PATIENT, lookup_timeout_s=0.2, probe_pause_min_s=0.05)
RUN = run_of(3)
MISS = RunHits((), 0, 3)


def test_a_client_without_a_daemon_answers_misses(path) -> None:
    with Client(path) as client:
        namespace = client.namespace(spec())
        assert namespace.lookup(RUN) == MISS
        assert namespace.acquire(RUN) is None
        assert namespace.redeem(bytes(16), 0) is None
        assert namespace.reserve(RUN) is None
        assert namespace.get(RUN) == []
        assert namespace.put(zip(RUN, data_of(RUN), strict=True)).declined_count == 3
        assert client.status().state == "away"


def test_a_daemon_that_starts_later_is_found_with_no_call(path) -> None:
    with Client(path, options=PATIENT) as client:
        namespace = client.namespace(spec())
        with fake_daemon(path) as daemon:
            until(lambda: is_ready(client))
            stored(namespace, RUN)
            assert namespace.lookup(RUN).hit_count == 3
            assert daemon.count("OpenNamespace") == 1


def test_the_first_timeout_fails_every_waiting_call_at_once(daemon) -> None:
    with Client(daemon.path, options=HASTY) as client, ThreadPoolExecutor(8) as pool:
        namespace = client.namespace(spec())
        daemon.mute_heartbeats.set()
        held = [daemon.hold("Acquire"), daemon.hold("Lookup")]
        patient = [pool.submit(namespace.acquire, RUN, timeout_s=600.0) for _ in range(8)]
        daemon.wait_asked("Acquire", 8)
        assert namespace.lookup(RUN) == MISS
        assert [waiting.result(20) for waiting in patient] == [None] * 8
        for event in held:
            event.set()


def test_reserves_that_the_breaker_cut_short_are_given_up(daemon) -> None:
    """The daemon may have granted them: nobody else would ever tell it that nothing is written there."""
    with Client(daemon.path, options=HASTY) as client, ThreadPoolExecutor(2) as pool:
        namespace = client.namespace(spec())
        held = daemon.hold("Reserve")
        waiting = [pool.submit(namespace.reserve, run_of(2, name)) for name in ("one", "two")]
        reserves = [daemon.wait_asked("Reserve", count) for count in (1, 2)]
        client.control.open_breaker("a lookup's deadline has passed")
        assert [call.result(20) for call in waiting] == [None, None]
        aborts = [daemon.wait_asked("Abort", count) for count in (1, 2)]
        held.set()
        assert {abort.token for abort in aborts} == {reserve.token for reserve in reserves}


def test_acquires_that_the_breaker_cut_short_are_released(daemon) -> None:
    """The daemon may have granted them, and a device's slots would wait for this process's end."""
    with Client(daemon.path, options=HASTY) as client, ThreadPoolExecutor(2) as pool:
        namespace = client.namespace(spec())
        stored(namespace, RUN)
        held = daemon.hold("Acquire")
        waiting = [pool.submit(namespace.acquire, RUN, timeout_s=600.0) for _ in range(2)]
        tokens = {daemon.wait_asked("Acquire", count).token for count in (1, 2)}
        client.control.open_breaker("a lookup's deadline has passed")
        assert [call.result(20) for call in waiting] == [None, None]
        until(lambda: tokens == released(daemon))
        held.set()


def released(daemon: FakeDaemon) -> set[bytes]:
    """Tokens of leases of which all shards were released."""
    requests = [request for method, request in list(daemon.asked) if method == "Release"]
    return {entry.token for request in requests for entry in request.releases if not entry.shards}


def test_while_the_breaker_is_open_nothing_is_asked(daemon) -> None:
    with Client(daemon.path, options=HASTY) as client:
        namespace = client.namespace(spec())
        daemon.mute_heartbeats.set()
        held = daemon.hold("Lookup")
        assert namespace.lookup(RUN) == MISS
        for _ in range(50):
            assert namespace.lookup(RUN) == MISS
            assert namespace.acquire(RUN) is None
        assert (daemon.count("Lookup"), daemon.count("Acquire")) == (1, 0)
        assert client.status().state == "away"
        assert client.status().timeout_count == 1
        held.set()


def test_a_daemon_that_answers_again_is_asked_again_with_no_call(daemon) -> None:
    with Client(daemon.path, options=HASTY) as client:
        namespace = client.namespace(spec())
        stored(namespace, RUN)
        held = daemon.hold("Lookup")
        assert namespace.lookup(RUN) == MISS
        held.set()
        until(lambda: is_ready(client))
        assert namespace.lookup(RUN, timeout_s=10).hit_count == 3
        assert daemon.count("OpenSession") == 1


def test_a_session_that_stays_silent_is_given_up_and_opened_anew(daemon) -> None:
    options = replace(HASTY, control_timeout_s=0.1, answer_patience_s=0.3)
    with Client(daemon.path, options=options) as client:
        daemon.mute_heartbeats.set()
        until(lambda: client.status().state == "away")
        daemon.wait_asked("OpenSession", 2)
        daemon.mute_heartbeats.clear()
        until(lambda: is_ready(client))


def test_death_is_noticed_with_no_call(daemon, client) -> None:
    namespace = client.namespace(spec())
    daemon.die()
    until(lambda: client.status().state == "away")
    assert namespace.lookup(RUN) == MISS


def test_after_a_restart_everything_comes_back_and_nothing_of_the_old_boot_remains(path) -> None:
    with Client(path, options=PATIENT) as client:
        namespace = client.namespace(spec())
        with fake_daemon(path) as first:
            until(lambda: is_ready(client))
            stored(namespace, RUN)
            read = namespace.acquire(RUN)
            write = namespace.reserve(run_of(2, "other"))
        until(lambda: client.status().state == "away")
        with fake_daemon(path) as second:
            until(lambda: is_ready(client))
            assert client.status().boot_id == second.boot_id != first.boot_id
            assert read.expired()
            assert read.load(empty(3)) == 0
            assert write.store(data_of(run_of(2, "other"))).dropped == 2
            read.release()
            write.abort()
            stored(namespace, RUN)
            with namespace.acquire(RUN) as lease:
                assert lease.load(empty(3)) == 3
            daemon_was_told = second.wait_asked("Release")
            assert [release.token for release in daemon_was_told.releases] == [lease.token]
            assert second.count("Abort") == 0


def test_a_draining_daemon_is_asked_nothing_and_told_of_releases(daemon, client, namespace) -> None:
    stored(namespace, RUN)
    lease = namespace.acquire(RUN)
    daemon.tell(wire.OpenSessionResponse(draining=wire.Draining()))
    until(lambda: client.status().state == "draining")
    assert namespace.lookup(RUN) == MISS
    assert daemon.count("Lookup") == 0
    assert lease.load(empty(3)) == 3
    lease.release()
    daemon.wait_asked("Release")
    daemon.wait_asked("Heartbeat", daemon.count("Heartbeat") + 2)
    assert client.status().state == "draining"


def test_an_unknown_session_is_opened_anew(daemon, client, namespace) -> None:
    daemon.refuse("Acquire", grpc.StatusCode.NOT_FOUND, "SESSION_UNKNOWN")
    assert namespace.acquire(RUN) is None
    daemon.answers.clear()
    daemon.wait_asked("OpenSession", 2)
    until(lambda: is_ready(client))
    stored(namespace, RUN)
    assert namespace.acquire(RUN).hit_count == 3


def test_a_dropped_namespace_is_opened_at_its_new_epoch(daemon, client, namespace) -> None:
    daemon.refuse("Lookup", grpc.StatusCode.FAILED_PRECONDITION, "NAMESPACE_EPOCH_STALE")
    daemon.epoch = 2
    assert namespace.lookup(RUN) == MISS
    daemon.answers.clear()
    daemon.wait_asked("OpenNamespace", 2)
    until(lambda: namespace.lookup(RUN) and daemon.count("Lookup") > 1)
    assert daemon.wait_asked("Lookup", 2).namespace.epoch == 2
    assert client.status().breaker_opened_count == 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "LEASE_LIMIT"),
        (grpc.StatusCode.INTERNAL, "INTERNAL"),
        (grpc.StatusCode.NOT_FOUND, "LEASE_UNKNOWN"),
        (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_REQUIRED"),
        (grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH"),
    ],
)
def test_a_daemon_that_will_not_serve_is_a_miss_and_stays_connected(
    daemon, client, namespace, code, reason
) -> None:
    for method in ("Acquire", "Lookup", "Reserve"):
        daemon.refuse(method, code, reason)
    assert namespace.lookup(RUN) == MISS
    assert namespace.acquire(RUN) is None
    assert namespace.reserve(RUN) is None
    assert client.status().breaker_opened_count == 0


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED])
def test_a_refusal_of_the_callers_bug_is_raised_with_its_reason(daemon, namespace, code) -> None:
    daemon.refuse("Acquire", code, "FIELD_INVALID")
    with pytest.raises(DaemonRefused) as caught:
        namespace.acquire(RUN)
    assert (caught.value.reason, caught.value.code) == ("FIELD_INVALID", code.name)
    assert caught.value.metadata == {"field": "f"}


def test_a_namespace_that_is_refused_is_raised_when_it_is_opened_by_the_caller(daemon, client) -> None:
    daemon.refuse("OpenNamespace", grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_KV_GROUP")
    with pytest.raises(DaemonRefused, match="UNSUPPORTED_KV_GROUP"):
        client.namespace(spec())


def test_a_namespace_that_is_refused_in_the_background_misses(path) -> None:
    with Client(path, options=PATIENT) as client:
        namespace = client.namespace(spec())
        with fake_daemon(path) as daemon:
            daemon.refuse("OpenNamespace", grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_KV_GROUP")
            until(lambda: is_ready(client))
            assert namespace.lookup(RUN) == MISS
            assert daemon.count("Lookup") == 0


def test_retired_segments_are_let_go_of(daemon, client, namespace) -> None:
    stored(namespace, RUN)
    segments = client.control.session.segments
    before = segments.segment(SEGMENT_ID)
    retired = wire.SegmentsRetired(segment_ids=[SEGMENT_ID])
    daemon.tell(wire.OpenSessionResponse(segments_retired=retired))
    until(lambda: segments.segment(SEGMENT_ID) is not before)


def is_mapped_here(address: int) -> bool:
    """Whether this process has memory of a segment there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.startswith(f"{address:x}-") for line in lines)


def test_a_segment_that_is_retired_under_a_load_stays_until_the_load_is_over(
    daemon, client, namespace
) -> None:
    data = stored(namespace, RUN)
    segments = client.control.session.segments
    address = segments.segment(SEGMENT_ID).address
    until(lambda: not segments._work, "the end of prefaulting")
    targets = empty(3)
    with namespace.acquire(RUN) as lease, ThreadPoolExecutor(1) as pool, HeldCopies(client) as held:
        loading = pool.submit(lease.load, targets)
        assert held.reached.wait(20)
        retired = wire.SegmentsRetired(segment_ids=[SEGMENT_ID])
        daemon.tell(wire.OpenSessionResponse(segments_retired=retired))
        until(lambda: SEGMENT_ID not in segments._mapped, "the retirement")
        assert is_mapped_here(address)
        held.go()
        assert loading.result(20) == 3
    assert [bytes(target) for target in targets] == data
    until(lambda: not is_mapped_here(address), "the end of the mapping")


def test_sixteen_threads_put_and_get_at_once(daemon, client, namespace) -> None:
    start = threading.Barrier(16)

    def work(number: int) -> bool:
        hashes = run_of(3, f"thread {number}")
        start.wait(20)
        data = stored(namespace, hashes)
        targets = empty(3)
        with namespace.acquire(hashes) as lease:
            return lease.load(targets) == 3 and [bytes(target) for target in targets] == data

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))
