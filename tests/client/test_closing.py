"""Closing sends what waits, ends the session, and says so afterwards."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prefixd_client import Client, ClientClosed, InvalidArgument, RequestPhase, UsageReport

from tests.support.clients import PATIENT, HeldCopies, data_of, empty, run_of, spec, stored, until
from tests.support.repository import ROOT

RUN = run_of(2)


def test_what_waits_is_sent_before_the_end(daemon) -> None:
    with Client(daemon.path, options=PATIENT) as client:
        namespace = client.namespace(spec())
        stored(namespace, RUN)
        lease = namespace.acquire(RUN)
        lease.release()
        namespace.report_usage(UsageReport(request_id="1", phase=RequestPhase.STARTED, block_hashes=RUN))
    assert daemon.wait_asked("Release").releases[0].token == lease.token
    (report,) = daemon.wait_asked("ReportUsage").reports
    assert (report.request_id, list(report.block_hashes), report.namespace.epoch) == ("1", RUN, 1)


def test_what_is_held_is_given_back_before_the_end(daemon) -> None:
    with Client(daemon.path, options=PATIENT) as client:
        namespace = client.namespace(spec())
        stored(namespace, RUN)
        reading, writing = namespace.acquire(RUN), namespace.reserve(run_of(1, "new"))
    assert daemon.wait_asked("Abort").token == writing.token
    (release,) = daemon.wait_asked("Release").releases
    assert release.token == reading.token
    assert (reading.is_held, writing.is_held) == (False, False)


def test_blocks_are_given_up_when_nobody_writes_to_them_any_more(daemon) -> None:
    client = Client(daemon.path, options=PATIENT)
    writing = client.namespace(spec()).reserve(RUN)
    with ThreadPoolExecutor(2) as pool, HeldCopies(client) as held:
        storing = pool.submit(writing.store, data_of(RUN))
        assert held.reached.wait(20)
        closing = pool.submit(client.close)
        until(lambda: client.status().state == "closed")
        assert writing.is_held
        held.go()
        assert storing.result(20).dropped >= 1, "a copy goes on after its block"
        closing.result(20)
    assert daemon.wait_asked("Abort").token == writing.token


def test_a_closed_client_says_so(daemon) -> None:
    client = Client(daemon.path, options=PATIENT)
    namespace = client.namespace(spec())
    stored(namespace, RUN)
    lease = namespace.acquire(RUN)
    client.close()
    client.close()
    for call in (
        lambda: client.namespace(spec()),
        lambda: namespace.lookup(RUN),
        lambda: namespace.put([]),
        lambda: lease.load(empty(2)),
    ):
        with pytest.raises(ClientClosed, match="make a new one"):
            call()
    lease.release()
    assert client.status().state == "closed"


def test_no_thread_of_a_closed_client_stays(daemon) -> None:
    def ours() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("prefixd-")}

    with Client(daemon.path, options=PATIENT):
        assert ours() >= {"prefixd-keeper", "prefixd-session", "prefixd-segments"}
    until(lambda: not ours(), "the end of the threads")


@pytest.mark.parametrize("last_line", ["", "del client, namespace, lease"], ids=["held", "forgotten"])
def test_a_process_that_forgets_to_close_ends_and_sends_what_waits(daemon, last_line) -> None:
    script = (
        "import sys; from prefixd_client import Client; from tests.support.clients import *\n"
        "client = Client(sys.argv[1], options=PATIENT); namespace = client.namespace(spec())\n"
        "stored(namespace, run_of(2)); lease = namespace.acquire(run_of(2)); lease.release()\n" + last_line
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, daemon.path],
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr.decode()
    daemon.wait_asked("Release")


@pytest.mark.parametrize("address", ["nonsense", "host:", ":1", ""])
def test_an_address_that_cannot_be_one_is_named(address) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client(address)
    assert caught.value.field == "address"


@pytest.mark.parametrize(
    "report",
    [
        UsageReport(request_id="1", phase=RequestPhase.STARTED, block_hashes=[b"short"]),
        UsageReport(request_id="1", phase=RequestPhase.FINISHED, output_token_count=-1),
        UsageReport(request_id=1, phase=RequestPhase.FINISHED),  # type: ignore[arg-type]  # what is tested
    ],
)
def test_a_wrong_report_is_raised_where_it_is_made(namespace, report) -> None:
    with pytest.raises(InvalidArgument):
        namespace.report_usage(report)
