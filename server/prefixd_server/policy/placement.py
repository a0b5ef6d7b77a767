"""Which copies are to be made between tiers, without a request that waits for them.

Down: what a tier is about to lose should lie in the next one before room is
needed. Up: what is expected to be used more than once within the window
(POLICY.md D4). Plain functions; the daemon and the simulator call the same.
"""

from __future__ import annotations

from dataclasses import dataclass

USES_MIN = 2.0
"""Uses expected within the window that make a copy in the faster tier worth its transfer."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Parts of a tier's slots that are in use, 0 to 1, low below high.

    Above `high` copies are made in the next tier until those that would go next, down
    to `low`, have one. They are dropped when room is needed, not before: a copy that is
    kept below costs nothing to drop, and may be used once more.
    """

    high: float
    low: float


def demotion_count(slot_count: int, free_count: int, marks: Watermarks) -> int:
    """Of the copies that would go next, how many should have one in the next tier; 0 below the high mark."""
    if free_count >= slot_count * (1 - marks.high):
        return 0
    return max(0, round(slot_count * (1 - marks.low)) - free_count)


def expected_uses(gap_s: float, window_s: float) -> float:
    """Uses expected within the window of what was used now and `gap_s` seconds before.

    One gap says little, but a burst shows in its first: whoever comes back after g
    seconds is expected every g seconds.
    """
    return window_s / max(gap_s, 1e-6)


def worth_promoting(use_count: int, gap_s: float, window_s: float) -> bool:
    """Whether blocks that a request found in a slower tier are to be brought beyond what it asked for.

    Args:
        use_count: requests that used them, this one included.
        gap_s: since the use before this one.
    """
    return use_count > 1 and expected_uses(gap_s, window_s) >= USES_MIN
