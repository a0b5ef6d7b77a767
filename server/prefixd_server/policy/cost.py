"""What it costs to get a block, per place: recomputation or transfer (POLICY.md D3).

    recompute(p) = base x (1 + p / P0)      p = position in tokens, P0 = N_params / (2 L d_model)
    transfer     = bytes / bandwidth + latency / batch

Rates come from the engines (prefill time and tokens of their reports) or from
the operator. Multiplying by a recomputation cost pays only at the last copy; above it
what is saved is one transfer, the same for every block of a size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ATTENTION_DOUBLING_TOKENS = 30_500.0
"""P0: position where attention costs as much as all the rest; of an 8B model with 32 layers of 4096."""


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Prefill cost of a block: seconds, by position.

    Args:
        tokens_per_s: prefill rate at position 0, measured or told.
        doubling_tokens: P0 above.
        block_tokens: tokens of a block.
    """

    tokens_per_s: float
    block_tokens: int
    doubling_tokens: float = ATTENTION_DOUBLING_TOKENS

    def seconds(self, depths: NDArray[np.integer]) -> NDArray[np.float64]:
        """Time to recompute each block; depth counts the blocks before it."""
        positions = depths.astype(np.float64) * self.block_tokens
        return self.block_tokens / self.tokens_per_s * (1.0 + positions / self.doubling_tokens)


@dataclass(frozen=True, slots=True)
class TransferCost:
    """A link: bytes per second, and latency in seconds shared by the blocks of one transfer."""

    bytes_per_s: float
    latency_s: float = 0.0
    batch_blocks: int = 1

    def seconds(self, block_bytes: int) -> float:
        """Time to move one block."""
        return block_bytes / self.bytes_per_s + self.latency_s / self.batch_blocks


def saving_s(
    recompute: RecomputeCost,
    here: TransferCost,
    below: TransferCost | None,
    depths: NDArray[np.integer],
    block_bytes: int,
) -> NDArray[np.float64]:
    """delta_T: time that a copy here saves against the next slower place, never negative.

    Args:
        below: the link of the tier that holds another copy; None at the last copy.
    """
    if below is not None:
        saved = np.full(len(depths), below.seconds(block_bytes) - here.seconds(block_bytes))
    else:
        saved = recompute.seconds(depths) - here.seconds(block_bytes)
    return saved.clip(min=0.0)
