"""Tiny random-weight models, made in a moment and never saved unless a test asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512
BLOCK_TOKENS = 16
"""Small, so that a test's prompts hold many blocks."""


def tiny_llama(
    *, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa", seed: int = 0, **overrides: Any
) -> Any:
    """Two layers, four query and two KV heads of 16: 256 elements of KV per token."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "eos_token_id": VOCABULARY - 1,
        "attn_implementation": attn_implementation,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**fields, **overrides})).to(dtype).eval()


def prompt(token_count: int, *, seed: int = 0) -> list[int]:
    """Token ids without structure; with one seed, a longer prompt extends a shorter."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY - 2, token_count)]
