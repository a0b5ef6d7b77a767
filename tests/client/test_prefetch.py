"""Prefetches by the client: what is sent, how the answer reads, and on a real daemon with an NVMe tier."""

from __future__ import annotations

from itertools import count

import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_client import AsyncClient, Client, InvalidArgument, Namespace, PrefetchStatus, Tier

from tests.support.clients import PATIENT, data_of, empty, run_of, spec, stored, until
from tests.support.daemon import DaemonProcess
from tests.support.fake_daemon import FakeDaemon
from tests.support.wire import short_directory

BLOCK_BYTES = 4096


def test_a_prefetch_says_where_its_request_stands(daemon: FakeDaemon, namespace: Namespace) -> None:
    stored(namespace, run_of(2))
    status = namespace.prefetch(run_of(5), queue_position=3, deadline_s=1.5)
    assert status == PrefetchStatus(bytes(16), 2, 0, 3)
    (sent,) = daemon.wait_asked("Prefetch").runs
    assert (sent.queue_position, sent.deadline.ToMilliseconds()) == (3, 1500)
    assert list(sent.block_hashes) == run_of(5)
    assert namespace.cancel_prefetch([status.prefetch_id]) == 1


async def test_the_async_client_prefetches_too(daemon: FakeDaemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        assert await namespace.prefetch(run_of(2)) == PrefetchStatus(bytes(16), 0, 0, 2)
        assert await namespace.cancel_prefetch([bytes(16)]) == 1
        assert await namespace.keep_quiet(5.0)
    assert not daemon.wait_asked("Prefetch").runs[0].HasField("deadline")
    assert daemon.wait_asked("ReportUsage").quiet_period.seconds == 5


def test_nothing_is_asked_for_nothing(daemon: FakeDaemon, namespace: Namespace) -> None:
    assert namespace.prefetch([]) is None
    assert namespace.cancel_prefetch([]) == 0
    assert daemon.count("Prefetch") == daemon.count("CancelPrefetch") == 0


def test_an_answer_that_does_not_add_up_is_none(daemon: FakeDaemon, namespace: Namespace) -> None:
    wrong = wire.PrefetchResponse(runs=[wire.PrefetchStatus(ready_block_count=1)])
    for answer in (wrong, wire.PrefetchResponse()):
        daemon.answers["Prefetch"] = lambda _request, _context, answer=answer: answer
        assert namespace.prefetch(run_of(2)) is None


def test_what_is_no_place_or_no_span_is_refused(namespace: Namespace) -> None:
    for fields in ({"queue_position": -1}, {"queue_position": 1 << 40}, {"deadline_s": float("nan")}):
        with pytest.raises(InvalidArgument):
            namespace.prefetch(run_of(1), **fields)
    with pytest.raises(InvalidArgument, match="span_s"):
        namespace.keep_quiet(-1.0)


def test_lookup_tells_when_a_run_will_be_readable(daemon: FakeDaemon, namespace: Namespace) -> None:
    entry = types_pb2.TierReadiness(tier=types_pb2.TIER_NVME, ready_block_count=2)
    entry.ready_after.FromMilliseconds(250)
    hits = [types_pb2.TierHit(tier=types_pb2.TIER_NVME, block_count=2)]
    unknown = types_pb2.TierReadiness(tier=types_pb2.TIER_DRAM, pending_block_count=1)
    for readiness, after_s in (([], 0.0), ([entry], 0.25), ([entry, unknown], None)):
        answer = wire.LookupResponse(hits=hits, readiness=readiness)
        daemon.answers["Lookup"] = lambda _request, _context, answer=answer: answer
        assert namespace.lookup(run_of(2)).ready_after_s == after_s


def test_a_prefetched_run_is_hit_in_dram_without_waiting() -> None:
    with short_directory() as directory:
        settings = {
            "dram.size": "4MiB",
            "nvme.size": "64MiB",
            "nvme.segment": "4MiB",
            "nvme.directories": str(directory / "nvme"),
        }
        flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with (
            DaemonProcess(directory / "p.sock", *flags) as process,
            Client(process.socket, options=PATIENT) as client,
        ):
            namespace = client.namespace(spec())
            run = run_of(16, "wanted")
            stored(namespace, run)
            names = (f"other {number}" for number in count())
            until(lambda: _fell_out(namespace, run, next(names)), "NVMe's copy alone")
            status = namespace.prefetch(run, deadline_s=60.0)
            assert status is not None
            assert (status.ready_count, status.pending_count) == (0, 16)
            until(lambda: namespace.lookup(run).hits == ((Tier.DRAM, 16),), "the copy in DRAM")
            with namespace.acquire(run) as lease:
                targets = empty(16, BLOCK_BYTES)
                assert lease.load(targets) == 16
                assert [bytes(target) for target in targets] == data_of(run)
            assert namespace.cancel_prefetch([status.prefetch_id]) == 0, "it has ended by itself"


def _fell_out(namespace: Namespace, run: list[bytes], other: str) -> bool:
    """Whether NVMe alone has the run; stores another where not."""
    if namespace.lookup(run).hits == ((Tier.NVME, len(run)),):
        return True
    stored(namespace, run_of(32, other))
    return False
