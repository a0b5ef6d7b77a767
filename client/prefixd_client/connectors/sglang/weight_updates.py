"""Notices that SGLang has updated its weights in place, which no storage is told.

KV computed with new weights under the old weights' name would be a lie to every other engine. SGLang's
updater ends each update with one of two steps; both are made to count here, before anything is computed with
the new weights.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ..engine_settings import UnsupportedEngine

STEPS = ("record_weight_version_after_update", "flush_cache_after_weight_update")
"""Of SGLang's SchedulerWeightUpdaterManager: a success ends with the first, any change with the second."""

_lock = threading.Lock()
_count = 0
_watched: set[type] = set()


def update_count() -> int:
    """Updates of weights in this process since watch(); each counts once or twice."""
    return _count


def watch() -> None:
    """Begins to count; again does nothing. Raises UnsupportedEngine when this release updates otherwise."""
    try:
        from sglang.srt.managers.scheduler_components import weight_updater  # noqa: PLC0415 - imports workers
    except ImportError as error:
        raise _unknown(str(error)) from error
    watch_class(weight_updater.SchedulerWeightUpdaterManager)


def watch_class(updater: type) -> None:
    """Counts the updates of one updater class. Raises UnsupportedEngine when it lacks the steps."""
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
