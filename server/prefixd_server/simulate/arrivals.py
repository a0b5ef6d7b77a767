"""When a reply ends, as far as a log can tell: arrival + TTFT + output tokens x TPOT.

Nothing about a reply is known before that. The rates are assumptions, stated in
every report.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


TTFT_BASE_S = 0.1
PREFILL_TOKENS_PER_S = 8000.0
TPOT_S = 0.02


@dataclass(frozen=True, slots=True)
class ServingModel:
    """How fast the engine is thought to be."""

    ttft_base_s: float = TTFT_BASE_S
    """Time to the first token when everything hits: scheduling and one step."""
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    """About an 8B model on one current GPU."""
    tpot_s: float = TPOT_S
    """Time per output token."""

    def ttft_s(self, missed_tokens: float) -> float:
        """Time to the first token when so many tokens have to be computed."""
        return self.ttft_base_s + missed_tokens / self.prefill_tokens_per_s

    def reply_s(self, missed_tokens: float, output_tokens: float) -> float:
        """Time from arrival to the end of the reply."""
        return self.ttft_s(missed_tokens) + output_tokens * self.tpot_s


class Pending(Generic[T]):
    """Replies that have not ended yet, in the order of their ends."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, ends_at: float, item: T) -> None:
        """The reply of `item` will end then."""
        self._serial += 1
        heapq.heappush(self._heap, (ends_at, self._serial, item))

    @property
    def next_end(self) -> float:
        """When the next of them ends; infinite where there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def ended(self, now: float) -> list[T]:
        """Takes out what has ended by `now`, the earliest first."""
        ended = []
        while self._heap and self._heap[0][0] <= now:
            ended.append(heapq.heappop(self._heap)[2])
        return ended
