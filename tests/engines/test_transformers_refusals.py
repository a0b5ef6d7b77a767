"""Models whose KV does not follow the prefix law are refused, and told why."""

from __future__ import annotations

import pytest
import torch
from prefixd_client.connectors.transformers import PrefixCachedModel, UnsupportedModel
from prefixd_client.errors import InvalidArgument
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support.models import tiny_llama

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def windowed():
    return MistralForCausalLM(MistralConfig(**SMALL, **HEADS, sliding_window=8))


def partly_windowed():
    config = Qwen2Config(**SMALL, **HEADS, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    return Qwen2ForCausalLM(config)


def recurrent():
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))


def encoder_decoder():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    )


def stretched():
    return tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


def on_another_device():
    return tiny_llama().to("meta")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (windowed, "sliding window of 8"),
        (partly_windowed, "sliding"),
        (recurrent, "linear_attention"),
        (encoder_decoder, "encoder-decoder"),
        (stretched, "RoPE of type dynamic"),
        (on_another_device, "weights on meta"),
    ],
)
def test_a_model_outside_the_prefix_law_is_refused_with_the_reason(make, why) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        PrefixCachedModel(make(), None)


def test_a_model_with_full_attention_in_every_layer_is_served() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL, **HEADS))
    assert PrefixCachedModel(model, None).prefill([1, 2, 3]).logits.shape == (64,)


def test_an_empty_prompt_and_an_empty_block_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        PrefixCachedModel(tiny_llama(), None).prefill([])
    with pytest.raises(InvalidArgument, match="block_tokens"):
        PrefixCachedModel(tiny_llama(), None, block_tokens=0)


def test_a_model_in_training_is_put_into_evaluation() -> None:
    model = tiny_llama(attention_dropout=0.5).train()
    cached = PrefixCachedModel(model, None)
    assert torch.equal(cached.prefill(list(range(9))).logits, cached.prefill(list(range(9))).logits)
