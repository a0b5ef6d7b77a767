"""Attention mass per block is a share of what the model looked at."""

from __future__ import annotations

import numpy as np
import torch
from prefixd_client.connectors.transformers import PrefixCachedModel
from prefixd_client.connectors.transformers.attention import attention_mass

from tests.support.models import BLOCK_TOKENS, prompt, tiny_llama


def test_mass_is_the_mean_over_layers_heads_and_queries_summed_by_block() -> None:
    one = torch.tensor([[[[0.5, 0.5, 0.0, 0.0, 0.0]]]])
    other = torch.tensor([[[[0.0, 0.0, 0.5, 0.0, 0.5]]]])
    np.testing.assert_allclose(attention_mass([one, other], 2, 2), [0.5, 0.25])


def test_a_model_that_computes_attention_weights_reports_shares() -> None:
    model = PrefixCachedModel(tiny_llama(attn_implementation="eager"), None, block_tokens=BLOCK_TOKENS)
    mass = model.prefill(prompt(4 * BLOCK_TOKENS + 3)).attention_mass
    assert mass.shape == (4,)
    assert (mass > 0).all()
    assert mass.sum() <= 1.0


def test_a_model_that_does_not_reports_none() -> None:
    model = PrefixCachedModel(tiny_llama(), None, block_tokens=BLOCK_TOKENS)
    assert model.prefill(prompt(40)).attention_mass.size == 0
