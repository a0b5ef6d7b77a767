"""When an engine is at work with its cache: attached, it still has its namespaces to open, a moment later."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.support.vllm_models import prompt

PROBE = prompt(300, 99_000)
"""Two blocks of 128 tokens and some, that no other test asks for."""
TIMEOUT_S = 60.0


def wait_until_at_work(cached_tokens: Callable[[list[int]], int]) -> None:
    """Returns once a prompt is saved and hit.

    Args:
        cached_tokens: asks the engine for a reply to a prompt; how much of it was hit.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while cached_tokens(PROBE) == 0:
        assert time.monotonic() < deadline, "the engine neither saves nor hits"
