"""How much background work the engines bear: their decode latency and their quiet periods.

Additive increase, multiplicative decrease: while the 99th percentile of the decode
latencies that engines report is above the target, the factor halves at each step;
otherwise it grows back. In a quiet period it is zero.

Pure: times are arguments, monotonic seconds.
"""

from __future__ import annotations

from collections import deque

import numpy as np

STEP_S = 0.25
"""How often the factor moves."""
DECREASE = 0.5
INCREASE = 0.05
"""From nothing to all in five seconds."""
FACTOR_MIN = 1 / 64
"""Some background work goes on: without any, nobody would notice that it has become bearable."""
SAMPLE_AGE_S_MAX = 1.0
SAMPLE_COUNT_MAX = 1024
QUIET_S_MAX = 60.0
"""Longest quiet period that an engine can announce at a time."""


class Pace:
    """See the module.

    Args:
        target_s: p99 of the decode latency that is borne, seconds per output token; 0 for any.
    """

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._factor = 1.0
        self._stepped_at: float | None = None
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLE_COUNT_MAX)
        self._quiet_until: dict[str, float] = {}

    def observe(self, decode_latency_s: float, now: float) -> None:
        """An engine reports the decode latency of a reply."""
        self._samples.append((now, decode_latency_s))

    def keep_quiet(self, instance_id: str, span_s: float, now: float) -> None:
        """An engine wants no background copies for a time; 0 ends its earlier wish."""
        if span_s <= 0:
            self._quiet_until.pop(instance_id, None)
        else:
            self._quiet_until[instance_id] = now + min(span_s, QUIET_S_MAX)

    def quiet_for(self, now: float) -> float:
        """Seconds until the last quiet period ends; 0 outside of one."""
        self._quiet_until = {name: until for name, until in self._quiet_until.items() if until > now}
        return max((until - now for until in self._quiet_until.values()), default=0.0)

    def decode_p99_s(self, now: float) -> float | None:
        """Of the last second's reports; None without any."""
        while self._samples and self._samples[0][0] < now - SAMPLE_AGE_S_MAX:
            self._samples.popleft()
        return float(np.percentile([value for _, value in self._samples], 99)) if self._samples else None

    def factor(self, now: float) -> float:
        """Part of the background's share that it may have now, 0 to 1."""
        if self.quiet_for(now) > 0:
            return 0.0
        if self._stepped_at is None:
            self._stepped_at = now
        steps = int((now - self._stepped_at) / STEP_S)
        if steps > 0:
            self._stepped_at = now if steps > 1 else self._stepped_at + STEP_S
            p99_s = self.decode_p99_s(now)
            if self.target_s and p99_s is not None and p99_s > self.target_s:
                self._factor = max(FACTOR_MIN, self._factor * DECREASE)
            else:
                self._factor = min(1.0, self._factor + INCREASE * steps)
        return self._factor
