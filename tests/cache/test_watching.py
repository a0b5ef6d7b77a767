"""Watchers: in order, bounded, and told what they missed."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.errors import LimitReached
from prefixd_server.base.types import NamespaceRef, StopReason
from prefixd_server.cache import watching
from prefixd_server.cache.watching import EventsLost, RequestBegan, RequestEnded, Watchers

from tests.support.specs import spec


def ended(number: int) -> RequestEnded:
    return RequestEnded(float(number), "one", str(number), number, StopReason.UNKNOWN)


def began(hash_count: int) -> RequestBegan:
    run = np.zeros((hash_count, 4), dtype=np.uint64)
    return RequestBegan(0.0, NamespaceRef(bytes(32), 1), spec(), "one", "r", run, 0)


async def test_events_come_in_order_and_what_was_lost_is_counted_where_it_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(watching, "EVENT_COUNT_MAX", 3)
    watchers = Watchers()
    watch = watchers.open("red")
    for number in range(5):
        watchers.tell("red", ended(number))
    events = aiter(watch)
    assert [await anext(events) for _ in range(3)] == [ended(0), ended(1), ended(2)]
    watchers.tell("red", ended(5))
    assert [await anext(events) for _ in range(2)] == [EventsLost(5.0, 2), ended(5)]


async def test_hashes_that_wait_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(watching, "HASH_COUNT_MAX", 10)
    watchers = Watchers()
    watch = watchers.open("red")
    for _ in range(2):
        watchers.tell("red", began(6))
    events = aiter(watch)
    assert isinstance(await anext(events), RequestBegan)
    watchers.tell("red", began(6))
    assert await anext(events) == EventsLost(0.0, 1)


async def test_a_tenant_is_watched_by_few_and_not_by_others() -> None:
    watchers = Watchers()
    watches = [watchers.open("red") for _ in range(watching.WATCHER_COUNT_MAX)]
    with pytest.raises(LimitReached):
        watchers.open("red")
    assert not watchers.watched("blue")
    for watch in watches:
        watchers.close("red", watch)
    assert not watchers.watched("red")
