"""Waiting for blocks of slower tiers: what is sent, how long the client has patience."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prefixd_client import AsyncClient, Client, InvalidArgument, Namespace

from tests.support.clients import run_of, spec, stored
from tests.support.fake_daemon import FakeDaemon


def seconds(request: Any) -> float:
    """The wait that a request asks for; 0 when it asks for none."""
    return request.max_wait.ToNanoseconds() / 1e9 if request.HasField("max_wait") else 0.0


@pytest.mark.parametrize(("asked", "sent"), [(0.0, 0.0), (0.25, 0.25), (3600.0, 10.0)])
def test_the_wait_is_sent_within_what_the_daemon_grants(
    daemon: FakeDaemon, namespace: Namespace, asked: float, sent: float
) -> None:
    namespace.acquire(run_of(2), max_wait_s=asked)
    assert seconds(daemon.wait_asked("Acquire")) == sent


async def test_the_async_client_sends_it_too(daemon: FakeDaemon) -> None:
    async with AsyncClient(daemon.path) as client:
        namespace = await client.namespace(spec())
        await namespace.acquire(run_of(2), max_wait_s=0.5)
    assert seconds(daemon.wait_asked("Acquire")) == 0.5


def test_a_wait_that_the_daemon_uses_up_is_no_timeout(daemon: FakeDaemon) -> None:
    with Client(daemon.path) as client:
        namespace = client.namespace(spec())
        stored(namespace, run_of(2))
        answers = daemon.hold("Acquire")
        timer = threading.Timer(3 * client.control.options.lookup_timeout_s, answers.set)
        timer.start()
        lease = namespace.acquire(run_of(2), max_wait_s=10.0)
        timer.join()
        assert lease is not None
        assert lease.hit_count == 2
        lease.release()
        assert client.status().timeout_count == 0


@pytest.mark.parametrize("wait_s", [-1.0, float("inf"), float("nan")])
def test_a_wait_that_is_no_span_is_refused(namespace: Namespace, wait_s: float) -> None:
    with pytest.raises(InvalidArgument, match="max_wait_s"):
        namespace.acquire(run_of(2), max_wait_s=wait_s)
