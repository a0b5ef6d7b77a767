"""Breaker, pauses, outbox, failures: the parts of law 2 one by one."""

from __future__ import annotations

import grpc
import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_client.breaker import Backoff, Breaker
from prefixd_client.calls import duration, usable_until
from prefixd_client.failures import Failure, Verdict
from prefixd_client.outbox import Abort, Outbox

from tests.support.clients import spec

BOOT, OTHER = b"boot", b"other"


def closed_breaker(now=lambda: 100.0) -> Breaker:
    breaker = Breaker(now)
    breaker.close()
    return breaker


def test_a_new_breaker_is_open() -> None:
    assert Breaker(lambda: 0.0).enter(lambda: None) == -1


def test_opening_cancels_what_waits_and_nothing_that_has_left() -> None:
    breaker, cancelled = closed_breaker(), []
    tickets = [breaker.enter(lambda n=n: cancelled.append(n)) for n in range(3)]
    breaker.leave(tickets[1])
    assert breaker.open("why")
    assert cancelled == [0, 2]
    assert not breaker.open("again")
    assert (breaker.reason, breaker.opened_count) == ("why", 1)


def test_a_call_may_end_while_it_is_cancelled() -> None:
    breaker = closed_breaker()
    ticket = breaker.enter(lambda: breaker.leave(ticket))
    breaker.open("why")


def test_the_breaker_tells_since_when() -> None:
    now = [100.0]
    breaker = closed_breaker(lambda: now[0])
    assert breaker.open_s == 0.0
    breaker.open("why")
    now[0] = 107.0
    assert breaker.open_s == 7.0


def test_pauses_double_up_to_a_bound() -> None:
    backoff = Backoff(0.05, 0.3)
    assert [backoff.next_pause_s() for _ in range(5)] == [0.05, 0.1, 0.2, 0.3, 0.3]
    backoff.reset()
    assert backoff.next_pause_s() == 0.05


def release(token: bytes) -> wire.LeaseRelease:
    return wire.LeaseRelease(token=token)


def test_the_outbox_keeps_order_and_drops_other_boots() -> None:
    outbox = Outbox(10, 10)
    outbox.end_lease(OTHER, release(b"0"))
    for token in (b"1", b"2", b"3"):
        outbox.end_lease(BOOT, release(token))
    outbox.end_lease(BOOT, Abort(b"4"))
    releases, aborts = outbox.take_endings(BOOT)
    assert ([r.token for r in releases], aborts) == ([b"1", b"2", b"3"], [Abort(b"4")])
    outbox.end_lease(BOOT, release(b"5"))
    outbox.put_back(BOOT, releases[1:], aborts)
    releases, aborts = outbox.take_endings(BOOT)
    assert ([r.token for r in releases], aborts) == ([b"2", b"3", b"5"], [Abort(b"4")])
    assert len(outbox) == 0


def test_the_outbox_is_bounded_and_counts_what_it_drops() -> None:
    outbox = Outbox(2, 2)
    for number in range(4):
        outbox.end_lease(BOOT, Abort(bytes([number])))
        outbox.report_usage(spec(), wire.UsageReport(request_id=str(number)))
    assert outbox.take_endings(BOOT)[1] == [Abort(b"\x02"), Abort(b"\x03")]
    assert [report.request_id for _, report in outbox.take_usage(1000)] == ["2", "3"]
    assert outbox.dropped_count == 4


def test_reports_travel_in_batches_that_the_daemon_takes() -> None:
    outbox = Outbox(1, 2000)
    for _ in range(5):
        outbox.report_usage(spec(), wire.UsageReport(block_hashes=[b"x"] * 10))
    for _ in range(1500):
        outbox.report_usage(spec(), wire.UsageReport())
    assert [len(outbox.take_usage(25)) for _ in range(4)] == [2, 2, 1024, 477]
    assert len(outbox) == 0


def test_a_run_that_is_too_long_to_be_reported_is_cut() -> None:
    outbox = Outbox(1, 10)
    outbox.report_usage(spec(), wire.UsageReport(block_hashes=[b"x"] * 30, attention_mass=[0.01] * 30))
    outbox.report_usage(spec(), wire.UsageReport(block_hashes=[b"x"]))
    ((_, report),) = outbox.take_usage(25)
    assert (len(report.block_hashes), len(report.attention_mass)) == (25, 25)
    assert len(outbox.take_usage(25)) == 1


def test_releases_travel_in_batches_that_the_daemon_takes() -> None:
    outbox = Outbox(10_000, 1)
    for _ in range(2100):
        outbox.end_lease(BOOT, wire.LeaseRelease(shards=range(8)))
    for _ in range(5000):
        outbox.end_lease(BOOT, release(b"1"))
    bad = [wire.BadBlock()] * 9000
    for _ in range(2):
        outbox.end_lease(BOOT, wire.LeaseRelease(bad_blocks=bad))
    assert [len(outbox.take_endings(BOOT)[0]) for _ in range(4)] == [2048, 4096, 957, 1]
    assert len(outbox) == 0


def test_a_batch_has_few_aborts_since_each_is_a_call() -> None:
    outbox = Outbox(1000, 1)
    for _ in range(100):
        outbox.end_lease(BOOT, Abort(b"1"))
    assert [len(outbox.take_endings(BOOT)[1]) for _ in range(2)] == [64, 36]


@pytest.mark.parametrize(
    ("code", "reason", "verdict"),
    [
        ("DEADLINE_EXCEEDED", "", Verdict.AWAY),
        ("UNAVAILABLE", "DRAINING", Verdict.AWAY),
        ("NOT_FOUND", "SESSION_UNKNOWN", Verdict.SESSION_ENDED),
        ("FAILED_PRECONDITION", "COMPANION_MISSING", Verdict.SESSION_ENDED),
        ("NOT_FOUND", "NAMESPACE_UNKNOWN", Verdict.NAMESPACE_ENDED),
        ("FAILED_PRECONDITION", "NAMESPACE_EPOCH_STALE", Verdict.NAMESPACE_ENDED),
        ("INVALID_ARGUMENT", "FIELD_INVALID", Verdict.REFUSED),
        ("UNIMPLEMENTED", "UNSUPPORTED_KV_GROUP", Verdict.REFUSED),
        ("UNIMPLEMENTED", "", Verdict.MISS),
        ("NOT_FOUND", "LEASE_UNKNOWN", Verdict.MISS),
        ("RESOURCE_EXHAUSTED", "LEASE_LIMIT", Verdict.MISS),
        ("CANCELLED", "", Verdict.MISS),
    ],
)
def test_each_failure_has_its_verdict(code, reason, verdict) -> None:
    assert Failure("Lookup", grpc.StatusCode[code], "", reason).verdict is verdict


def test_a_lease_is_used_for_80_percent_of_its_life_from_before_it_was_asked_for() -> None:
    assert usable_until(1000.0, duration(30.0)) == 1024.0


@pytest.mark.parametrize("seconds", [0.0, 0.05, 1.5, 2.999999999, 3.9999999999])
def test_durations_are_right_to_the_nanosecond(seconds) -> None:
    assert abs(duration(seconds).ToNanoseconds() / 1e9 - seconds) <= 1e-9
    assert duration(None) is None
