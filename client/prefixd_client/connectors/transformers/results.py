"""What the connector answers with: plain values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from prefixd_client.values import StopReason

from .kv_cache import BlockCache


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """Where a prefill's tokens and time went. The first logits took load_s + compute_s."""

    token_count: int
    hit_token_count: int
    stored_token_count: int
    load_s: float
    compute_s: float
    store_s: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt whose KV is complete.

    block_hashes: of its full blocks, from the root. logits: [vocabulary] of the last token. cache: give it to
    the model as past_key_values to go on.
    attention_mass: share per full block, from models that compute attention weights ("eager"); else empty.
    """

    request_id: str
    block_hashes: list[bytes]
    logits: torch.Tensor
    cache: BlockCache
    stats: PrefillStats
    attention_mass: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Generation:
    """A reply: its tokens, the logits [tokens, vocabulary] each was chosen from, and the prefill before."""

    tokens: list[int]
    logits: torch.Tensor
    prefill: Prefill
    stop_reason: StopReason
