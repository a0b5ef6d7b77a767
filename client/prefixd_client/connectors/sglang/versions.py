"""Which SGLang releases the connector works with: the only place that asks.

SGLang's storage interface moves between patch releases, and what the connector reads of the engine besides
(engine.py, weight_updates.py) is not promised at all. Another release is refused at start instead of failing
in the middle of a request.
"""

from __future__ import annotations

from ..engine_settings import UnsupportedEngine

RUN_AGAINST = ("0.5.23",)
"""Releases that the tests run."""


def refuse_unsupported_version(version: str) -> None:
    """Raises UnsupportedEngine for a release that nobody has run."""
    if version.partition("+")[0] not in RUN_AGAINST:
        raise UnsupportedEngine(
            f"SGLang {version} is not supported",
            f"install SGLang {' or '.join(RUN_AGAINST)}, or a prefixd release that names yours in "
            "docs/howto-sglang.md",
        )


def layout_version(version: str) -> str:
    """What a namespace carries: releases are kept apart."""
    return f"sglang-{version.partition('+')[0]}"
