"""The connector's cache holds what transformers' own would, in memory that blocks are copied to and from."""

from __future__ import annotations

import ctypes

import pytest
import torch
from prefixd_client.connectors.transformers import BlockCache, UnsupportedModel
from prefixd_client.connectors.transformers.kv_cache import probe_shape
from transformers import DynamicCache

from tests.support.models import BLOCK_TOKENS, prompt, tiny_llama


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    with torch.no_grad():
        yield tiny_llama(dtype=request.param)


def run(model, cache, tokens, first=0):
    """Logits of all tokens from `first` on, a block at a time."""
    chunks = [tokens[start : start + BLOCK_TOKENS] for start in range(first, len(tokens), BLOCK_TOKENS)]
    outputs = [model(torch.tensor([chunk]), past_key_values=cache).logits for chunk in chunks]
    return torch.cat(outputs, dim=1)


def bytes_of(pieces) -> bytes:
    """What lies at a block's addresses."""
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in pieces)


def test_logits_equal_those_over_transformers_own_cache(model) -> None:
    tokens = prompt(5 * BLOCK_TOKENS + 3)
    cache = BlockCache(probe_shape(model, BLOCK_TOKENS), len(tokens))
    assert torch.equal(run(model, cache, tokens), run(model, DynamicCache(config=model.config), tokens))


def test_a_block_s_pieces_hold_keys_and_values_layer_by_layer(model) -> None:
    tokens = prompt(3 * BLOCK_TOKENS)
    shape = probe_shape(model, BLOCK_TOKENS)
    cache, own = BlockCache(shape, len(tokens)), DynamicCache(config=model.config)
    run(model, cache, tokens)
    run(model, own, tokens)
    (pieces,) = cache.block_memory(1, 2)
    block = slice(BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    expected = b"".join(
        tensor[0, :, block].transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes()
        for layer in own.layers
        for tensor in (layer.keys, layer.values)
    )
    assert bytes_of(pieces) == expected
    assert len(expected) == shape.block_bytes


def test_blocks_copied_into_a_fresh_cache_give_the_same_logits(model) -> None:
    tokens = prompt(6 * BLOCK_TOKENS + 5)
    shape = probe_shape(model, BLOCK_TOKENS)
    source, target = BlockCache(shape, len(tokens)), BlockCache(shape, len(tokens))
    expected = run(model, source, tokens)
    for taken, given in zip(source.block_memory(0, 4), target.block_memory(0, 4), strict=True):
        for (origin, nbytes), (address, _) in zip(taken, given, strict=True):
            ctypes.memmove(address, origin, nbytes)
    target.set_length(4 * BLOCK_TOKENS)
    assert torch.equal(run(model, target, tokens, 4 * BLOCK_TOKENS), expected[:, 4 * BLOCK_TOKENS :])


def test_a_cache_that_is_full_grows_and_keeps_what_it_holds(model) -> None:
    tokens = prompt(7 * BLOCK_TOKENS)
    shape = probe_shape(model, BLOCK_TOKENS)
    small, large = BlockCache(shape, 1), BlockCache(shape, len(tokens))
    assert torch.equal(run(model, small, tokens), run(model, large, tokens))
    assert small.get_seq_length() == len(tokens)


def test_a_batch_of_several_sequences_is_refused(model) -> None:
    cache = BlockCache(probe_shape(model, BLOCK_TOKENS), BLOCK_TOKENS)
    with pytest.raises(UnsupportedModel, match="batch of 2"):
        model(torch.tensor([prompt(4), prompt(4)]), past_key_values=cache)
