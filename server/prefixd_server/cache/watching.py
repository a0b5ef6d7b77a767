"""Telling watchers of requests and conservative mode as they begin and end: bounded, never waited for.

A watcher that is too slow loses events and is told how many. Events carry the
hashes that an engine sent, and no tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

from prefixd_server.base.errors import LimitReached
from prefixd_server.base.types import Hashes, NamespaceRef, NamespaceSpec, StopReason

WATCHER_COUNT_MAX = 4
"""Per tenant."""
EVENT_COUNT_MAX = 4096
HASH_COUNT_MAX = 1 << 18
"""Hashes of events that one watcher has not taken yet: 8 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestBegan:
    """A request was counted; at is seconds since the epoch."""

    at: float
    namespace: NamespaceRef
    spec: NamespaceSpec
    instance_id: str
    request_id: str
    run: Hashes
    kept_count: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Its reply has ended; at is seconds since the epoch."""

    at: float
    instance_id: str
    request_id: str
    output_token_count: int
    stop: StopReason


@dataclass(frozen=True, slots=True)
class ConservativeModeChanged:
    """Conservative mode of the node began or ended, and why; at is seconds since the epoch."""

    at: float
    on: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EventsLost:
    """So many events before the next one are missing."""

    at: float
    count: int


Told: TypeAlias = RequestBegan | RequestEnded | ConservativeModeChanged
Event: TypeAlias = Told | EventsLost


class Watch:
    """The events of one watcher, in order, as an asynchronous iterator."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._hash_count = 0
        self._lost = 0
        self._filled = asyncio.Event()

    def tell(self, event: Told) -> None:
        """Queues an event, or counts it as lost when too much waits."""
        size = _hash_count(event)
        if len(self._events) >= EVENT_COUNT_MAX or self._hash_count + size > HASH_COUNT_MAX:
            self._lost += 1
            return
        if self._lost:
            self._events.append(EventsLost(event.at, self._lost))
            self._lost = 0
        self._hash_count += size
        self._events.append(event)
        self._filled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events for ever; waits for the next."""
        while True:
            while not self._events:
                self._filled.clear()
                await self._filled.wait()
            event = self._events.popleft()
            self._hash_count -= _hash_count(event)
            yield event


class Watchers:
    """Who watches which tenant. Owned by the event loop."""

    def __init__(self) -> None:
        self._watches: dict[str, list[Watch]] = {}

    def open(self, tenant: str) -> Watch:
        """A new watch; close() it. Raises LimitReached WATCHER_LIMIT."""
        watches = self._watches.setdefault(tenant, [])
        if len(watches) >= WATCHER_COUNT_MAX:
            raise LimitReached(
                "WATCHER_LIMIT",
                f"{WATCHER_COUNT_MAX} callers watch already; end one of them",
                limit=WATCHER_COUNT_MAX,
            )
        watches.append(Watch())
        return watches[-1]

    def close(self, tenant: str, watch: Watch) -> None:
        """Ends a watch. Idempotent."""
        watches = self._watches.get(tenant, [])
        if watch in watches:
            watches.remove(watch)

    def tell(self, tenant: str, event: Told) -> None:
        """Tells everybody who watches the tenant."""
        for watch in self._watches.get(tenant, ()):
            watch.tell(event)

    def tell_all(self, event: Told) -> None:
        """Tells everybody of what concerns the whole node."""
        for tenant in self._watches:
            self.tell(tenant, event)

    def watched(self, tenant: str) -> bool:
        """Whether anybody watches: otherwise an event need not be made."""
        return bool(self._watches.get(tenant))


def _hash_count(event: Event) -> int:
    return len(event.run) if isinstance(event, RequestBegan) else 0
