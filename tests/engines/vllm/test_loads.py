"""Loads between steps: what ends can be taken, and a step that only waits for the cache lets them work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from prefixd_client.connectors.vllm.jobs import LoadJob
from prefixd_client.connectors.vllm.loads import Loads
from prefixd_client.connectors.vllm.metadata import StepJobs
from prefixd_client.connectors.vllm.tallies import Tallies
from prefixd_client.connectors.vllm.worker import WorkerSide

from tests.support.clients import spec

JOB = LoadJob(7, "r", spec(), b"t" * 16, 0, (3, 4, 5), in_step=False)


@dataclass
class Copies:
    """Copies when the test lets it: two of three blocks come out right."""

    may_copy: threading.Event = field(default_factory=threading.Event)
    block_bytes = 64

    def mark(self) -> int:
        return 0

    def begin(self, mark: int) -> None:
        assert self.may_copy.wait(10)

    def load(self, *_: Any) -> int:
        return 2

    def close(self) -> None:
        pass


class Lease:
    """A lease that can be redeemed."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def loading(copies: Copies) -> Iterator[Loads]:
    """Loads whose one job is under way."""
    namespace = SimpleNamespace(redeem=lambda _token, _shard: Lease())
    loads = Loads(copies, 0, lambda _: namespace, Tallies())  # type: ignore[arg-type]  # as far as it is used
    loads.start(JOB)
    try:
        yield loads
    finally:
        copies.may_copy.set()
        loads.close()


def test_a_wait_ends_with_the_load_or_with_its_time() -> None:
    copies = Copies()
    with loading(copies) as loads:
        loads.wait(0.001)
        assert not loads.take().done
        copies.may_copy.set()
        loads.wait(3600)
        ended = loads.take()
    assert (ended.done, ended.counts, ended.bad) == ({"r"}, {7: 2}, {5})


def test_only_a_step_that_waits_for_the_cache_gives_way() -> None:
    copies = Copies()
    with loading(copies) as loads:
        side = WorkerSide(None, None, [], 0, writes=True, give_way_s=3600)  # type: ignore[arg-type]  # not used
        side._loads = loads
        side.give_way(StepJobs())
        assert side.finished() == (set(), set())
        threading.Timer(0.05, copies.may_copy.set).start()
        side.give_way(StepJobs(is_waiting=True))
        assert side.finished() == (set(), {"r"})
