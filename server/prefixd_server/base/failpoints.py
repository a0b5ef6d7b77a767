"""Named places where a test may kill the process: the crash tests' only lever inside it.

Armed by the environment, PREFIXD_FAILPOINTS="name=3,other=1": the third time
that `name` is reached the process is killed as by SIGKILL. Not armed, a
failpoint costs one look into an empty dict.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "PREFIXD_FAILPOINTS"


def _armed(text: str) -> dict[str, int]:
    pairs = (item.partition("=") for item in text.split(",") if item)
    return {name: int(count or "1") for name, _, count in pairs}


_remaining = _armed(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Dies here when the environment says so."""
    if name in _remaining:
        _remaining[name] -= 1
        if _remaining[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
