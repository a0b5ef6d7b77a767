"""The governor of one link between two tiers: who may copy when, and how much of it is background work.

Demand goes at once. Background work (prefetch before demotion) goes while no
demand is under way or waiting, a piece at a time once there has been demand
lately, and within a share of the rate that the link was measured to have. The
engines' pace (pace.py) scales that share, down to nothing. An idle link is lent whole.
A link that is kept for demand gives up what waits: a copy that cannot go holds slots at both its ends.

Copies are governed, not their planning: what is to be copied is the scheduler's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

from prefixd_server.base.traffic import LinkStats
from prefixd_server.base.types import Tier
from prefixd_server.base.work import Errand, Urgency
from prefixd_server.cache.link_rate import LinkRate
from prefixd_server.cache.pace import Pace

IDLE_AFTER_S = 1.0
"""A link without demand for so long belongs to the background."""
BACKGROUND_COUNT_MAX = 4
"""Background pieces under way on an idle link: enough to keep a drive busy."""
WAIT_S_MAX = 0.1
"""How late a change of pace is noticed."""
RATE_S = 1.0
"""Time over which demand's part of the link is averaged."""


Governors: TypeAlias = Mapping[frozenset[Tier], "Governor"]
"""By the two tiers of the link; copies between others go ungoverned."""


class Governor:
    """See the module. Owned by the event loop; times are the loop's.

    Args:
        name: of the link, for people.
        share: part of the link's rate that background work may take beside demand, above 0, at most 1.
    """

    def __init__(self, name: str, share: float, pace: Pace) -> None:
        self.name = name
        self._share = share
        self._pace = pace
        self._waiting: list[tuple[Errand, asyncio.Future[Urgency | None], int]] = []
        """Background pieces in order of arrival: whose, as what it is let go (None: given up), its bytes."""
        self._demand = 0
        self._background = 0
        self._next_at = 0.0
        """When the share allows the next background piece."""
        self._demand_at = float("-inf")
        self._hurried = False
        self._demand_only = False
        self._timer: asyncio.TimerHandle | None = None
        self._rates: dict[str, LinkRate] = {}
        self.demand_busy = LinkRate()
        """Of all demand together, for its part of the link's time."""
        self.bytes_by_urgency = dict.fromkeys(Urgency, 0)
        self._ahead_bytes: dict[str, int] = {}
        """Under way, by direction."""

    @asynccontextmanager
    async def turn(self, errand: Errand, size_bytes: int, direction: str) -> AsyncIterator[bool]:
        """Waits until the piece may be copied; copy it inside, or nothing where it is False: given up.

        Args:
            errand: whose piece; when its urgency rises to DEMAND, call urged().
            direction: what is copied the same way has one rate.
        """
        urgency: Urgency | None = errand.urgency
        if urgency is not Urgency.DEMAND:
            urgency = await self._wait(errand, size_bytes)
        if urgency is None:
            yield False
            return
        try:
            with self._under_way(urgency, size_bytes, direction):
                yield True
        finally:
            self._pump()

    def urged(self) -> None:
        """An errand's urgency has risen."""
        self._pump()

    def hurry(self) -> None:
        """From now on nothing waits: what is under way is to end, and nothing follows."""
        self._hurried = True
        self._pump()

    def keep_for_demand(self, demand_only: bool) -> None:
        """While demand_only, background pieces are given up and do not wait; those that wait, too."""
        if demand_only is not self._demand_only:
            self._demand_only = demand_only
            self._pump()

    def factor(self) -> float:
        """What the engines' pace leaves of the background's share, 0 to 1."""
        return self._pace.factor(loop_time())

    def demand_share(self) -> float:
        """Part of the last second's time in which demand was under way, 0 to 1."""
        return self.demand_busy.busy_share(loop_time(), RATE_S)

    def estimate_s(self, size_bytes: int, direction: str) -> float | None:
        """When bytes that are asked for now will have arrived; None while the rate is not known."""
        rate = self._rate(direction).bytes_per_s
        return None if rate is None else (size_bytes + self._ahead_bytes.get(direction, 0)) / rate

    def bytes_per_s(self, direction: str) -> float | None:
        """As measured while busy; None while it is not known."""
        return self._rate(direction).bytes_per_s

    def stats(self) -> LinkStats:
        """For people."""
        now = loop_time()
        return LinkStats(
            name=self.name,
            demand_bytes=self.bytes_by_urgency[Urgency.DEMAND],
            prefetch_bytes=self.bytes_by_urgency[Urgency.PREFETCH],
            demotion_bytes=self.bytes_by_urgency[Urgency.DEMOTION],
            background_share=self._cap(now),
            demand_share=self.demand_share(),
            bytes_per_s={name: rate.bytes_per_s or 0.0 for name, rate in self._rates.items()},
        )

    # -- turns ---------------------------------------------------------------------------------

    async def _wait(self, errand: Errand, size_bytes: int) -> Urgency | None:
        """Waits for a turn; as what it was given, None when it was given up."""
        turn: asyncio.Future[Urgency | None] = asyncio.get_running_loop().create_future()
        entry = (errand, turn, size_bytes)
        self._waiting.append(entry)
        self._pump()
        try:
            return await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not turn.cancelled() and turn.result() not in (Urgency.DEMAND, None):
                self._background -= 1
            self._pump()
            raise

    @contextmanager
    def _under_way(self, urgency: Urgency, size_bytes: int, direction: str) -> Iterator[None]:
        began = loop_time()
        rate = self._rate(direction)
        rate.begin(began)
        self._ahead_bytes[direction] = self._ahead_bytes.get(direction, 0) + size_bytes
        if urgency is Urgency.DEMAND:
            self._demand += 1
            self.demand_busy.begin(began)
        try:
            yield
        finally:
            ended = loop_time()
            rate.end(ended, size_bytes)
            self._ahead_bytes[direction] -= size_bytes
            self.bytes_by_urgency[urgency] += size_bytes
            if urgency is Urgency.DEMAND:
                self._demand -= 1
                self._demand_at = ended
                self.demand_busy.end(ended, size_bytes)
            else:
                self._background -= 1

    def _pump(self) -> None:
        """Gives turns to whom they are due; looks again when the next may be."""
        now = loop_time()
        for entry in sorted(self._waiting, key=lambda entry: entry[0].urgency):
            errand, turn, size_bytes = entry
            if turn.done():  # whoever waited was cancelled, and is about to notice
                continue
            urgency: Urgency | None = errand.urgency
            if urgency is not Urgency.DEMAND:
                if self._demand_only and not self._hurried:
                    urgency = None
                elif self._may_start(now):
                    self._background += 1
                    self._book(size_bytes, now)
                else:
                    break
            self._waiting.remove(entry)
            turn.set_result(urgency)
        if self._waiting and self._timer is None:
            delay = min(self._next_at - now, WAIT_S_MAX) if self._next_at > now else WAIT_S_MAX
            self._timer = asyncio.get_running_loop().call_later(delay, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._pump()

    def _may_start(self, now: float) -> bool:
        if self._hurried:
            return True
        if self._demand or self._pace.factor(now) <= 0 or now < self._next_at:
            return False
        return self._background < (BACKGROUND_COUNT_MAX if self._idle(now) else 1)

    def _book(self, size_bytes: int, now: float) -> None:
        """The piece's part of the share: the next one may start when it is used up."""
        cap = self._cap(now)
        rates = [rate.bytes_per_s for rate in self._rates.values() if rate.bytes_per_s]
        if cap < 1 and rates:
            self._next_at = max(now, self._next_at) + size_bytes / (cap * max(rates))

    def _cap(self, now: float) -> float:
        """Part of the link's rate that background work may take now."""
        return self._pace.factor(now) * (1.0 if self._idle(now) else self._share)

    def _idle(self, now: float) -> bool:
        return self._demand == 0 and now - self._demand_at >= IDLE_AFTER_S

    def _rate(self, direction: str) -> LinkRate:
        return self._rates.setdefault(direction, LinkRate())


def loop_time() -> float:
    """The running loop's time; outside of one, the clock that loops go by."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
