"""What the fuzz suites share: how long they go on, their corpus, and what must not grow.

PREFIXD_FUZZ_FACTOR=100 has every suite try a hundred times as many examples as `make test` does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
FACTOR = float(os.environ.get("PREFIXD_FUZZ_FACTOR", "1"))
GROWTH_MAX = 8
"""Descriptors and threads that gRPC may have more of at a time; a leak shows in each of many examples."""


def examples(count: int) -> Callable[[Any], Any]:
    """A property tried with so many examples, more by PREFIXD_FUZZ_FACTOR.

    What fails is told as it was found: to shrink it takes minutes, and it is reproduced by its seed.
    """
    return settings(
        max_examples=max(1, int(count * FACTOR)),
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def corpus(surface: str) -> list[Path]:
    """Inputs that were found worth keeping, of one surface."""
    found = sorted(path for path in (CORPUS / surface).iterdir() if path.is_file())
    assert found, f"there is no corpus of {surface}"
    return found


class Growth:
    """Open descriptors and threads of this process, as they were when it was made."""

    def __init__(self) -> None:
        self._before = self._now()

    def check(self) -> None:
        """Raises AssertionError when there are more than a few more."""
        now = self._now()
        grown = [after - before for before, after in zip(self._before, now, strict=True)]
        assert max(grown) <= GROWTH_MAX, f"(descriptors, threads) were {self._before} and are {now}"

    @staticmethod
    def _now() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
