"""Whoever answers, and whatever: nonsense is a miss, never an error and never wrong bytes."""

from __future__ import annotations

import socket
import threading
from concurrent import futures
from contextlib import suppress

import grpc
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_client import Client, ClientOptions, RunHits

from tests.support.clients import PATIENT, empty, run_of, spec, stored
from tests.support.fake_daemon import abort

RUN = run_of(3)
MISS = RunHits((), 0, 3)


def changed(daemon, method, change):
    """The daemon's answer to a method, changed."""

    def answer(request, _context):
        honest = getattr(daemon, f"_{method.lower()}")(request)
        change(honest)
        return honest

    daemon.answers[method] = answer


def first_extent(answer):
    return answer.shard_extents[0].extents[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: first_extent(answer).checksums.pop(),
        lambda answer: first_extent(answer).checksums.append(1),
        lambda answer: setattr(first_extent(answer), "block_count", 0),
        lambda answer: setattr(first_extent(answer), "block_count", 2),
        lambda answer: setattr(first_extent(answer), "stride_bytes", 4095),
        lambda answer: setattr(first_extent(answer), "first_block", 1),
        lambda answer: setattr(first_extent(answer), "tier", types_pb2.TIER_NVME),
        lambda answer: setattr(answer.shard_extents[0].extents[1], "first_block", 2),
        lambda answer: answer.shard_extents[0].extents.pop(),
        lambda answer: answer.shard_extents.pop(),
        lambda answer: setattr(answer.shard_extents[0], "shard", 1),
        lambda answer: setattr(answer.shard_extents[0], "kv_group", 1),
        lambda answer: setattr(answer, "miss_block_count", 7),
        lambda answer: setattr(answer.lease, "boot_id", bytes(16)),
    ],
)
def test_a_lease_that_contradicts_itself_is_a_miss(daemon, namespace, change) -> None:
    stored(namespace, RUN)
    changed(daemon, "Acquire", change)
    assert namespace.acquire(RUN) is None


@pytest.mark.parametrize(
    ("field", "value"), [("segment_id", 99), ("offset_bytes", 1 << 40), ("offset_bytes", 64 * 4096 - 100)]
)
def test_an_extent_outside_of_what_is_mapped_ends_the_hit(daemon, namespace, field, value) -> None:
    stored(namespace, RUN)
    changed(daemon, "Acquire", lambda answer: setattr(answer.shard_extents[0].extents[1], field, value))
    with namespace.acquire(RUN) as lease:
        assert lease.load(empty(3)) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.extents.pop(),
        lambda answer: setattr(answer.extents[0], "first_block", 1),
        lambda answer: setattr(answer.extents[0], "block_count", 1 << 31),
        lambda answer: setattr(answer.outcomes[0], "block_count", 1 << 31),
        lambda answer: answer.outcomes.pop(),
        lambda answer: setattr(answer.outcomes[0], "outcome", types_pb2.RESERVE_OUTCOME_PENDING),
        lambda answer: setattr(answer.lease, "boot_id", bytes(16)),
    ],
)
def test_a_reservation_that_contradicts_itself_is_a_miss(daemon, namespace, change) -> None:
    changed(daemon, "Reserve", change)
    assert namespace.reserve(RUN) is None


def test_a_commit_that_does_not_add_up_counts_as_dropped(daemon, namespace) -> None:
    changed(daemon, "Commit", lambda answer: setattr(answer, "visible_count", 9))
    with namespace.reserve(RUN) as lease:
        assert lease.store(empty(3)).dropped == 3


def test_values_that_only_a_newer_daemon_knows_are_unknown(daemon, namespace) -> None:
    hits = [types_pb2.TierHit(tier=9, block_count=3)]
    daemon.answers["Lookup"] = lambda _request, _context: wire.LookupResponse(hits=hits)
    assert [(tier.name, count) for tier, count in namespace.lookup(RUN).hits] == [("UNKNOWN", 3)]


@pytest.mark.parametrize("domain", ["other", ""])
def test_a_refusal_by_somebody_else_is_a_miss(daemon, namespace, domain) -> None:
    refused = grpc.StatusCode.UNIMPLEMENTED
    daemon.answers["Lookup"] = lambda _request, context: abort(context, refused, "ANY", domain)
    assert namespace.lookup(RUN) == MISS


def test_answers_that_are_no_messages_are_misses(path) -> None:
    def garbage(*_):
        return b"\xff" * 40

    stream = grpc.stream_stream_rpc_method_handler(lambda *_: iter([garbage()]))
    methods = {"OpenSession": stream, "Lookup": grpc.unary_unary_rpc_method_handler(garbage)}
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("prefixd.v1.CacheService", methods)]
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    with Client(path, options=PATIENT) as client:
        assert client.namespace(spec()).lookup(RUN) == MISS
        assert client.status().state == "away"
    server.stop(0).wait()


def test_a_reservation_of_absurd_length_is_refused_before_it_is_counted(daemon, namespace) -> None:
    changed(daemon, "Reserve", lambda answer: setattr(answer.extents[0], "block_count", 0xFFFFFFFF))
    assert namespace.reserve(RUN[:1]) is None


@pytest.mark.parametrize(
    "says", [b"", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"\xff" * 4096]
)
def test_a_socket_that_is_not_the_daemons_is_a_miss(path, says) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(says)

    threading.Thread(target=serve, daemon=True).start()
    with Client(path, options=ClientOptions(control_timeout_s=0.5)) as client:
        namespace = client.namespace(spec())
        assert namespace.lookup(RUN) == MISS
        assert client.status().state == "away"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_companion_that_does_not_answer_is_no_session(daemon) -> None:
    daemon._companion.close()
    with Client(daemon.path, options=PATIENT) as client:
        assert client.status().state == "away"
        assert client.namespace(spec()).acquire(RUN) is None
