"""`prefixd` over a disk that can be told to be slow or full: python -m tests.soak.disk CONTROL serve ...

CONTROL is a file; while it is there, its words say how the disk is: "slow SECONDS" or "full". Only the NVMe
tier's own reads and writes go through here; its index has a process of its own.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prefixd_server.app.cli import main
from prefixd_server.base.files import RealFiles


def suffering(call: Callable[..., int], control: Path, *, writes: bool) -> Callable[..., int]:
    """The call, as slow and as full as the disk is told to be."""

    def suffered(*arguments: object) -> int:
        try:
            kind, *seconds = control.read_text().split()
        except FileNotFoundError:
            return call(*arguments)
        time.sleep(sum(map(float, seconds)))
        if writes and kind == "full":
            raise OSError(errno.ENOSPC, "told to be full")
        return call(*arguments)

    return suffered


if __name__ == "__main__":
    told = Path(sys.argv.pop(1))
    RealFiles.read_at = suffering(RealFiles.read_at, told, writes=False)  # type: ignore[method-assign]  # the disk
    RealFiles.write_at = suffering(RealFiles.write_at, told, writes=True)  # type: ignore[method-assign]  # as above
    main()
