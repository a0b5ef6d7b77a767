"""Notices that SGLang updates its weights in place, which no storage is told.

KV computed with new weights under the old weights' name would be a lie to every other engine. Every way of
writing weights, also one that fails half way, goes through the runner's updater; its steps are made to count
here before they write. The scheduler's own steps are no place for it: it keeps them as bound methods, so what
is changed once an engine runs is not called.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ..engine_settings import UnsupportedEngine

STEPS = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)
"""Of SGLang's WeightUpdater: each may write weights. Between the last two others may, by RDMA."""

_lock = threading.Lock()
_count = 0
_watched: set[type] = set()


def update_count() -> int:
    """Steps of updates in this process since watch(); one update may be several."""
    return _count


def watch() -> None:
    """Begins to count; again does nothing. Raises UnsupportedEngine when this release updates otherwise."""
    try:
        from sglang.srt.model_executor.model_runner_components import (  # noqa: PLC0415 - imports models
            weight_updater,
        )

        updater = weight_updater.WeightUpdater
    except (ImportError, AttributeError) as error:
        raise _unknown(str(error)) from error
    watch_class(updater)


def watch_class(updater: type) -> None:
    """Counts the updates of one updater class. Raises UnsupportedEngine when it lacks a step."""
    with _lock:
        if updater in _watched:
            return
        for name in STEPS:
            if not callable(getattr(updater, name, None)):
                raise _unknown(f"{updater.__name__} has no {name}")
        for name in STEPS:
            setattr(updater, name, _counted(getattr(updater, name)))
        _watched.add(updater)


def _counted(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _count  # noqa: PLW0603 - weights belong to the process, and so does this
        with _lock:
            _count += 1
        return step(*args, **kwargs)

    return counted


def _unknown(finding: str) -> UnsupportedEngine:
    return UnsupportedEngine(
        f"cannot notice updates of weights in place ({finding})", "see docs/howto-sglang.md for the releases"
    )
