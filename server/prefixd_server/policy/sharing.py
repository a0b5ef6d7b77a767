"""Which blocks belong into the memory that engines share on the device: a plain function of what is known.

HBM is the scarcest tier, and a block pays there only when several requests read it soon.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.runs import leading
from prefixd_server.policy.placement import worth_promoting

LIVE_REQUESTS_MIN = 2


def shared_count(
    holds: NDArray[np.int64], use_counts: NDArray[np.int64], gaps_s: NDArray[np.float64], window_s: float
) -> int:
    """Leading blocks of a run that live requests share, each array one value a block.

    Args:
        holds: leases on the block, the one just asked for included.
        use_counts: requests that used it, this one included.
        gaps_s: since the use before this one.
        window_s: how far ahead a use counts.
    """
    held = holds >= LIVE_REQUESTS_MIN
    hot = np.array(
        [
            worth_promoting(count, gap, window_s)
            for count, gap in zip(use_counts.tolist(), gaps_s.tolist(), strict=True)
        ],
        dtype=np.bool_,
    )
    return leading(held | hot)
