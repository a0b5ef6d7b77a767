"""How much attention fell on each block: a signal of importance, where an engine has the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def attention_mass(
    attentions: Sequence[torch.Tensor], block_tokens: int, block_count: int
) -> NDArray[np.float32]:
    """Share of attention on each full block, the mean over layers, heads and query tokens.

    Args:
        attentions: per layer [1, heads, query tokens, key tokens], each row summing to 1; may be empty.
        block_tokens: tokens per block.
        block_count: full blocks of the run; key tokens behind them count for none.

    Returns:
        block_count shares of 0 to 1, summing to at most 1; none without attentions.
    """
    if not attentions:
        return np.empty(0, np.float32)
    per_token = torch.stack([layer[0].mean(dim=(0, 1), dtype=torch.float64) for layer in attentions]).mean(
        dim=0
    )
    per_block = per_token[: block_count * block_tokens].view(block_count, block_tokens).sum(dim=1).numpy()
    total = float(per_token.sum())
    shares = per_block / total if total > 1.0 else per_block
    return np.clip(shares, 0.0, 1.0).astype(np.float32)
