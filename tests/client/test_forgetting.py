"""A client that nobody closed is collected on any thread, wherever that is: it closes, and nobody hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

import pytest
from prefixd_client import AsyncClient, Client

from tests.support.clients import PATIENT, run_of, spec, stored, until
from tests.support.fake_daemon import FakeDaemon

CALLS = range(0, 120, 4)
"""Where a thread is when the collection comes: so many Python calls on; a turn of its loop has fewer."""
RUN = run_of(2)


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("prefixd-")}


@dataclass
class Holder:
    """The one reference to a client, and how many more calls of a thread it outlives."""

    client: Client | None
    calls_left: int


@dataclass
class Collector:
    """Lets go of clients inside the calls of threads that were started after it was made."""

    holders: dict[int | None, Holder]
    at_work: bool = False

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> None:
        holder = self.holders.get(threading.get_ident()) if self.at_work and event == "call" else None
        if holder is not None:
            holder.calls_left -= 1
            if holder.calls_left < 0:
                holder.client = None


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector({})
    threading.setprofile(made)
    yield made
    threading.setprofile(None)


@pytest.mark.parametrize("name", ["prefixd-keeper", "prefixd-session", "prefixd-segments"])
def test_a_client_is_collected_on_its_own_thread(daemon: FakeDaemon, collector: Collector, name: str) -> None:
    companions = []
    for calls in CALLS:
        before = our_threads()
        client = Client(daemon.path, options=PATIENT)
        (own,) = (thread for thread in our_threads() - before if thread.name == name)
        collector.holders[own.ident] = Holder(client, calls)
        companions.append(client.control.session.segments)
        del client
    collector.at_work = True

    def forgotten() -> bool:
        for segments in companions:
            segments.prefetch([99])  # the daemon has no such segment: it is asked for again and again
        return all(holder.client is None for holder in collector.holders.values())

    until(forgotten, "the collection of every client")
    until(lambda: not our_threads(), "the end of the threads")


def test_a_client_is_collected_inside_its_own_locks(daemon: FakeDaemon) -> None:
    client = Client(daemon.path, options=PATIENT)
    control, session = client.control, client.control.session
    locks = [
        control._lock,
        control.breaker._lock,
        control.outbox._lock,
        control.outbox.urgent._cond,
        control.statistics._lock,
        session._copies,
        session.segments._state,
    ]
    holder = Holder(client, 0)
    del client
    let_go = threading.Event()

    def collect() -> None:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            holder.client = None
            let_go.set()

    threading.Thread(target=collect, daemon=True).start()
    assert let_go.wait(20), "the collection waits for what cannot come"
    until(lambda: not our_threads(), "the end of the threads")


async def test_an_async_client_that_nobody_closed_is_closed(daemon: FakeDaemon) -> None:
    client = AsyncClient(daemon.path, options=PATIENT)
    await client.wait_ready()
    control = client.control
    del client
    until(lambda: not our_threads(), "the end of the threads")
    assert control.status().state == "closed"


def test_what_a_forgotten_client_holds_is_given_back(daemon: FakeDaemon) -> None:
    client = Client(daemon.path, options=PATIENT)
    namespace = client.namespace(spec())
    stored(namespace, RUN)
    lease = namespace.acquire(RUN)
    del client, namespace
    assert daemon.wait_asked("Release").releases[0].token == lease.token
