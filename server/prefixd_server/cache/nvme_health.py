"""Whether the NVMe tier may be read and written: faults pause it, and it resumes by itself.

    RECOVERING -> READY <-> FULL      no room on the disk: reads go on
                  READY <-> PAUSED    the disk fails or is slow, or the index is down: nothing goes on
                  any    -> REFUSED   what is on disk is not ours to use; until the next start
                  any    -> HANDED_OVER   the next daemon has it; nothing goes on here any more

A pause ends when the index is there and a probe of every directory has gone
well, and fast enough; each that has not makes the next one wait longer.
Engines notice misses, and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from prefixd_server.base.accounts import Fault
from prefixd_server.base.clock import Clock
from prefixd_server.base.errors import ConfigError, LimitReached
from prefixd_server.index.line import IndexUnavailable
from prefixd_server.index.process import IndexState
from prefixd_server.media.movers import CallJob, Movers
from prefixd_server.media.nvme import NvmeMedium

LOOK_INTERVAL_S = 0.05
"""How late a call that hangs, or the end of a pause, may be noticed."""
RETRY_PAUSE_MAX_FACTOR = 60
"""The longest pause before a probe, of the shortest."""
READ_ERROR_COUNT_MAX = 3
"""Reads that may fail one after another before the disk, and not a block, is taken to be bad."""

Flags: TypeAlias = NDArray[np.bool_]

log = structlog.get_logger(__name__)


class NvmeState(Enum):
    """See the module."""

    RECOVERING = "recovering"
    READY = "ready"
    FULL = "full"
    PAUSED = "paused"
    REFUSED = "refused"
    FAILED = "failed"
    """The disk failed while it was opened: there is no tier, and nothing here to pause or resume."""
    HANDED_OVER = "handed_over"


class NvmeHealth:
    """See the module. Owned by the event loop.

    Args:
        disk: the movers that do the tier's I/O, and the probe.
        latency_max_s: a call to the disk that takes longer pauses the tier.
        retry_pause_s: before the first probe after a fault.
    """

    def __init__(
        self, clock: Clock, medium: NvmeMedium, disk: Movers, latency_max_s: float, retry_pause_s: float
    ) -> None:
        self._clock = clock
        self._medium = medium
        self._disk = disk
        self._latency_max_s = latency_max_s
        self._retry_pause_min_s = retry_pause_s
        self._retry_pause_max_s = RETRY_PAUSE_MAX_FACTOR * retry_pause_s
        self._retry_pause_s = retry_pause_s
        self._probe_at = 0.0
        self._since = clock.now()
        self._index_ready = False
        self._read_errors_in_a_row = 0
        self._listeners: list[Callable[[], None]] = []
        self.state = NvmeState.RECOVERING
        self.reason = "the index is being read"
        self.faults: Counter[Fault] = Counter()
        """Since the daemon's start."""

    # -- what may be done ----------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        """Whether blocks may be read now."""
        return self.state in {NvmeState.READY, NvmeState.FULL}

    @property
    def writable(self) -> bool:
        """Whether blocks may be written now, and records deleted."""
        return self.state is NvmeState.READY

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Called after each change of state, on the loop."""
        self._listeners.append(listener)

    # -- what happened -------------------------------------------------------------------------

    def recovered(self, faults: Mapping[Fault, int]) -> None:
        """The index has been read; what was found damaged in it."""
        self.faults.update(faults)
        self._move(NvmeState.READY, "")

    def refuse(self, refusal: ConfigError) -> None:
        """The index is not ours to open: the tier stays off until the next start."""
        self._move(NvmeState.REFUSED, refusal.message)

    def hand_over(self) -> None:
        """The tier is about to be closed for the next daemon: nothing is begun any more, nobody waits."""
        self._move(NvmeState.HANDED_OVER, "the next daemon takes it over")

    def failed(self, error: Exception) -> None:
        """A transfer or a commit ended so. A queue that is full is no fault."""
        if isinstance(error, IndexUnavailable):
            self._stop(error.disk_full, str(error))
        elif isinstance(error, OSError):
            full = _is_full(error)
            self.faults[Fault.IO_ERROR] += not full
            self._stop(full, f"the disk failed: {error}")

    def read(self, bad: Flags, unreadable: Flags, faults: Sequence[OSError]) -> None:
        """A batch was read: its blocks' fate, and what the disk raised."""
        self.faults[Fault.BAD_CHECKSUM] += int(bad.sum())
        self.faults[Fault.UNREADABLE] += int(unreadable.sum())
        self.faults[Fault.IO_ERROR] += len(faults)
        self._read_errors_in_a_row = self._read_errors_in_a_row + len(faults) if faults else 0
        if self._read_errors_in_a_row >= READ_ERROR_COUNT_MAX:
            self._stop(
                False, f"{self._read_errors_in_a_row} reads failed in a row, the last with {faults[-1]}"
            )

    def index_changed(self, state: IndexState, fault: Exception | None) -> None:
        """The index process came or went."""
        self._index_ready = state is IndexState.READY
        if self._index_ready:
            self._probe_at = min(self._probe_at, self._clock.now())
        elif isinstance(fault, ConfigError):
            self.refuse(fault)
        elif fault is not None:
            self.faults[Fault.INDEX_FAULT] += 1
            self._stop(isinstance(fault, IndexUnavailable) and fault.disk_full, str(fault))

    # -- looking and trying again --------------------------------------------------------------

    async def run(self) -> None:
        """Looks and tries again, for ever; ends when cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self.step()

    async def step(self) -> None:
        """One look; and a probe, when one is due."""
        slowest_s = self._medium.stopwatch.slowest_s()
        if slowest_s > self._latency_max_s:
            self.faults[Fault.SLOW] += self.readable
            self._stop(False, f"a call to the disk took {slowest_s:.3g} s; {self._bound()}")
        stopped = self.state in {NvmeState.PAUSED, NvmeState.FULL}
        if stopped and self._clock.now() >= self._probe_at:
            await self._try_again()

    async def _try_again(self) -> None:
        """Resumes when the index is there, and every disk takes and gives back a block in time."""
        full, reason = False, ""
        began = self._clock.now()
        if self._medium.stopwatch.under_way_s() > self._latency_max_s:
            reason = f"a call to the disk hangs; {self._bound()}"
        else:
            try:
                await self._disk.run(CallJob(self._medium.probe))
            except (OSError, LimitReached) as error:
                full, reason = _is_full(error), f"the disk failed a probe: {error}"
        if not reason and self._clock.now() - began > self._latency_max_s:
            reason = f"a probe of the disk took {self._clock.now() - began:.3g} s; {self._bound()}"
        if not reason and not self._index_ready:
            reason = self.reason
        if reason:
            self._retry_pause_s = min(
                2 * self._retry_pause_s, RETRY_PAUSE_MAX_FACTOR * self._retry_pause_min_s
            )
            self._probe_at = self._clock.now() + self._retry_pause_s
            self._move(NvmeState.FULL if full else NvmeState.PAUSED, reason)
        else:
            self._move(NvmeState.READY, "")

    def _probe_later(self, pause_s: float) -> None:
        self._retry_pause_s = min(pause_s, self._retry_pause_max_s)
        self._probe_at = self._clock.now() + self._retry_pause_s

    def _bound(self) -> str:
        return f"nvme.latency_max is {self._latency_max_s:g} s"

    def _stop(self, full: bool, reason: str) -> None:
        """A fault. What is paused, recovers or is refused stays so, and says why."""
        if self.state is NvmeState.READY:
            # What fails again soon after it was resumed is asked less and less often.
            settled = self._clock.now() - self._since > self._retry_pause_max_s
            self._probe_later(self._retry_pause_min_s if settled else 2 * self._retry_pause_s)
            self.faults[Fault.DISK_FULL] += full
            self._move(NvmeState.FULL if full else NvmeState.PAUSED, reason)
        elif self.state is NvmeState.FULL and not full:
            self._move(NvmeState.PAUSED, reason)
        elif self.state is not NvmeState.REFUSED:
            self.reason = reason

    def _move(self, state: NvmeState, reason: str) -> None:
        former, self.state, self.reason = self.state, state, reason
        if state is former:
            return
        lasted_s = self._clock.now() - self._since
        self._since = self._clock.now()
        say = log.info if state in {NvmeState.READY, NvmeState.HANDED_OVER} else log.error
        say(f"NVMe tier {state.value}", was=former.value, lasted_s=round(lasted_s, 3), reason=reason)
        if state is NvmeState.READY:
            self._read_errors_in_a_row = 0
        for listener in self._listeners:
            listener()


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}
