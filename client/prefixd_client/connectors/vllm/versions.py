"""Which vLLM releases the connector works with, and what differs between them: the only place that asks.

vLLM's connector interface is marked experimental and moves; a release outside the range is refused at start
instead of failing in the middle of a request. docs/howto-vllm.md has the table.
"""

from __future__ import annotations

import re
from typing import Any

from ..engine_settings import UnsupportedEngine

FIRST = (0, 31)
LAST = (0, 32)
"""The newest release line that was run against; both ends are included."""


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as "0.32.0+cpu".

    Raises UnsupportedEngine when there are none to read.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise UnsupportedEngine(f"vLLM calls itself {version!r}: no release number", _remedy())
    return int(found[1]), int(found[2])


def refuse_unsupported_version(version: str) -> tuple[int, int]:
    """The release, when it is one the connector knows. Raises UnsupportedEngine otherwise."""
    release = release_of(version)
    if not FIRST <= release <= LAST:
        raise UnsupportedEngine(f"vLLM {version} is not supported", _remedy())
    return release


def layout_version(version: str) -> str:
    """What a namespace carries: releases of one line write the same bytes, others are kept apart."""
    major, minor = release_of(version)
    return f"vllm-{major}.{minor}"


def hit_source_names() -> Any | None:
    """vLLM's enum of hit sources, from 0.32 on; None before."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415 - absent before 0.32
    except ImportError:
        return None
    return CacheHitSource


def _remedy() -> str:
    first, last = (".".join(map(str, release)) for release in (FIRST, LAST))
    return f"install vLLM {first} to {last}, or a prefixd release that names yours in docs/howto-vllm.md"
