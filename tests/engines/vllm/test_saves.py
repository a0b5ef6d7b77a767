"""Saves in the background: whoever reuses their source waits for the copy, and never for the daemon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from prefixd_client.connectors.vllm.jobs import SaveJob
from prefixd_client.connectors.vllm.kv_copies import HostCopies
from prefixd_client.connectors.vllm.kv_memory import KvMemory
from prefixd_client.connectors.vllm.saves import Saves, SaveWay
from prefixd_client.connectors.vllm.tallies import Tallies
from prefixd_client.values import Committed, ReserveOutcome

RESERVED, PRESENT, DECLINED = ReserveOutcome.RESERVED, ReserveOutcome.PRESENT, ReserveOutcome.DECLINED


@dataclass
class Store:
    """The client's namespace, its leases and its calls, cranked by the test."""

    answers: list[tuple[list[ReserveOutcome], float | None]] = field(default_factory=list)
    asked: list[tuple[int, bytes]] = field(default_factory=list)
    copying: threading.Event = field(default_factory=threading.Event)
    may_copy: threading.Event = field(default_factory=threading.Event)
    may_commit: threading.Event = field(default_factory=threading.Event)
    copied: list[Any] = field(default_factory=list)
    aborted: int = 0

    def reserve(self, hashes: Any, *, parent_hash: bytes, **_: Any) -> Lease | None:
        self.asked.append((len(hashes), parent_hash))
        if not self.answers:
            return None
        outcomes, retry_after_s = self.answers.pop(0)
        return Lease(self, outcomes, retry_after_s)

    def run(self, call: int) -> Committed:
        assert self.may_commit.wait(10)
        return Committed(visible=call)


class Lease:
    """A write lease."""

    def __init__(self, store: Store, outcomes: list[ReserveOutcome], retry_after_s: float | None) -> None:
        self.store, self.outcomes, self.retry_after_s = store, outcomes, retry_after_s
        self.reserved_indexes = [index for index, outcome in enumerate(outcomes) if outcome is RESERVED]

    def copy_in(self, sources: Any, blocks: Any) -> int:
        self.store.copying.set()
        assert self.store.may_copy.wait(10)
        self.store.copied.extend(blocks)
        return len(sources)

    def settle(self, committed: Committed) -> Committed:
        return committed

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.aborted += 1


@contextmanager
def saving(store: Store, *, writes: bool = True, patience_s: float = 5.0) -> Iterator[Saves]:
    """Saves over a KV cache of 8 blocks."""
    copies = HostCopies(KvMemory.of({"layer": torch.zeros(8, 16)}, ["layer"], 8))
    way = SaveWay(lambda _: store, store.run, patience_s)
    saves = Saves(copies, way, 0, writes=writes, tallies=Tallies())
    try:
        yield saves
    finally:
        store.may_copy.set()
        store.may_commit.set()
        saves.close()


def job(job_id: int = 1, blocks: int = 4, request: str = "r") -> SaveJob:
    """A run of blocks 0, 1, ..."""
    hashes = tuple(bytes([index]) * 32 for index in range(blocks))
    return SaveJob(job_id, request, None, b"", hashes, tuple(range(blocks)), None)


def results(saves: Saves, count: int = 1) -> dict[int, int]:
    """Waits, as the engine's steps do, until so many jobs are over."""
    found: dict[int, int] = {}
    for _ in range(10_000):
        found |= saves.take().counts
        if len(found) == count:
            return found
        threading.Event().wait(0.001)
    raise AssertionError(f"only {found} of {count} saves ended")


def test_a_fence_returns_only_when_a_copy_under_way_has_read_its_source() -> None:
    store = Store(answers=[([RESERVED] * 4, None)])
    with saving(store) as saves:
        saves.start(job())
        assert store.copying.wait(10)
        fenced = threading.Thread(target=saves.fence, args=([1],))
        fenced.start()
        fenced.join(0.05)
        assert fenced.is_alive()
        store.may_copy.set()
        fenced.join(10)
        assert not fenced.is_alive()
        assert store.copied == [0, 1, 2, 3]


def test_a_fence_does_not_wait_for_the_daemons_answer_to_a_commit() -> None:
    store = Store(answers=[([RESERVED] * 4, None)])
    store.may_copy.set()
    with saving(store) as saves:
        saves.start(job())
        assert store.copying.wait(10)
        saves.fence([1])
        assert saves.take().counts == {}
        store.may_commit.set()
        assert results(saves) == {1: 4}


def test_a_fenced_save_that_waits_its_turn_never_reads_its_source() -> None:
    store = Store(answers=[([RESERVED] * 4, None), ([RESERVED] * 2, None)])
    with saving(store) as saves:
        saves.start(job(1))
        assert store.copying.wait(10)
        saves.start(job(2, 2))
        saves.fence([2])
        store.may_copy.set()
        store.may_commit.set()
        assert results(saves, 2) == {1: 4, 2: 0}
        assert len(store.asked) == 1


def test_a_declined_tail_is_tried_again_behind_what_was_kept() -> None:
    store = Store(answers=[([PRESENT, RESERVED, DECLINED, DECLINED], 0.001), ([RESERVED, RESERVED], None)])
    store.may_copy.set()
    store.may_commit.set()
    with saving(store) as saves:
        saves.start(job())
        assert results(saves) == {1: 4}
        assert store.asked == [(4, b""), (2, bytes([1]) * 32)]


@pytest.mark.parametrize("retry_after_s", [None, 60.0])
def test_a_save_gives_up_when_trying_again_does_not_help_or_takes_too_long(retry_after_s) -> None:
    store = Store(answers=[([RESERVED, DECLINED, DECLINED, DECLINED], retry_after_s)])
    store.may_copy.set()
    store.may_commit.set()
    with saving(store) as saves:
        saves.start(job())
        assert results(saves) == {1: 1}


def test_a_held_request_is_sent_when_its_last_save_is_over() -> None:
    store = Store(answers=[([RESERVED] * 4, None)])
    with saving(store) as saves:
        saves.start(job())
        saves.hold(["r", "without saves"])
        assert store.copying.wait(10)
        assert saves.take().sent == {"without saves"}
        store.may_copy.set()
        store.may_commit.set()
        results(saves)
        assert saves.take().sent | {"r"} == {"r"}


def test_a_rank_that_does_not_write_its_shard_reports_at_once() -> None:
    with saving(Store(), writes=False) as saves:
        saves.start(job())
        assert saves.take().counts == {1: 4}


def test_a_store_that_breaks_its_promises_costs_a_save_and_not_the_thread() -> None:
    store = Store(answers=[([RESERVED] * 9, None), ([PRESENT] * 4, None)])
    store.may_copy.set()
    store.may_commit.set()
    with saving(store) as saves:
        saves.start(job(1))
        saves.start(job(2))
        assert results(saves, 2) == {1: 0, 2: 4}
