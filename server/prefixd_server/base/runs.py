"""Arithmetic on runs that several floors need."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def leading(mask: NDArray[np.bool_]) -> int:
    """Length of the leading run of True."""
    if len(mask) == 0:
        return 0
    stop = int(mask.argmin())
    return len(mask) if mask[stop] else stop
