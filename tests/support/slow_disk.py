"""`prefixd` over a disk that takes its time: python -m tests.support.slow_disk SECONDS serve ...

Every positioned read and write of the NVMe tier takes so many seconds longer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from prefixd_server.app.cli import main
from prefixd_server.base.files import RealFiles


def slowed(call: Callable[..., int], seconds: float) -> Callable[..., int]:
    """The call, later."""

    def late(*arguments: object) -> int:
        time.sleep(seconds)
        return call(*arguments)

    return late


if __name__ == "__main__":
    delay_s = float(sys.argv.pop(1))
    RealFiles.read_at = slowed(RealFiles.read_at, delay_s)  # type: ignore[method-assign]  # the disk's seam
    RealFiles.write_at = slowed(RealFiles.write_at, delay_s)  # type: ignore[method-assign]  # as above
    main()
