"""A transformers cache whose memory the client library can copy blocks into and out of.

Each layer keeps K and V in one tensor each, token after token: [capacity_tokens, kv_heads, head_dim]. The K
of one block of one layer is then one contiguous piece, and so is its V; a block is the pieces K0 V0 K1 V1
... in layer order, the layout named KV_LAYOUT. The model reads views of the same memory, [1, kv_heads,
length, head_dim], so a loaded block is in its place with one copy, and a stored block is read where the
model wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from prefixd_client.layout import Pieces, paged_blocks

from .refusal import UnsupportedModel

KV_LAYOUT = "layer,kv,token,head,dim"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and dimensions of one layer's keys and values."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's KV looks like in a model.

    block_bytes = block_tokens * sum over layers of kv_heads * (key_dim + value_dim) * bytes of dtype.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        elements = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return self.block_tokens * elements * self.dtype.itemsize


class BlockLayer(DynamicLayer):
    """One layer's keys and values in memory of its own, filled from the front.

    keys and values, as the model sees them, are views of key_memory and value_memory up to the length.
    """

    def __init__(self, shape: LayerShape, dtype: torch.dtype, capacity_tokens: int) -> None:
        super().__init__()
        self.key_memory = torch.empty(capacity_tokens, shape.kv_heads, shape.key_dim, dtype=dtype)
        self.value_memory = torch.empty(capacity_tokens, shape.kv_heads, shape.value_dim, dtype=dtype)
        self.dtype, self.device = dtype, self.key_memory.device
        self.set_length(0)

    def set_length(self, length: int) -> None:
        """Declare the first `length` tokens as computed."""
        self.keys = self.key_memory[:length].transpose(0, 1).unsqueeze(0)
        self.values = self.value_memory[:length].transpose(0, 1).unsqueeze(0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, kv_heads, tokens, head_dim] and return everything up to there; grows when it must."""
        if key_states.shape[0] != 1:
            raise UnsupportedModel(f"a batch of {key_states.shape[0]} sequences: a prefixd cache holds one")
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > len(self.key_memory):
            self.key_memory = _grown(self.key_memory, start, 2 * end)
            self.value_memory = _grown(self.value_memory, start, 2 * end)
        self.key_memory[start:end] = key_states[0].transpose(0, 1)
        self.value_memory[start:end] = value_states[0].transpose(0, 1)
        self.set_length(end)
        return self.keys, self.values


def _grown(memory: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    """A larger copy of the first `length` tokens."""
    larger = torch.empty(capacity, *memory.shape[1:], dtype=memory.dtype)
    larger[:length] = memory[:length]
    return larger


class BlockCache(Cache):
    """The cache of one sequence; give it to the model as past_key_values.

    Args:
        shape: of the model's KV.
        room_tokens: tokens that fit without growing; rounded up to whole blocks.
    """

    def __init__(self, shape: KvShape, room_tokens: int) -> None:
        self.shape = shape
        block_count = max(1, -(-room_tokens // shape.block_tokens))
        capacity = block_count * shape.block_tokens
        self._block_layers = [BlockLayer(layer, shape.dtype, capacity) for layer in shape.layers]
        super().__init__(layers=self._block_layers)

    def set_length(self, length: int) -> None:
        """Declare the first `length` tokens of every layer as computed, after blocks were loaded."""
        for layer in self._block_layers:
            layer.set_length(length)

    def block_memory(self, first: int, last: int) -> Sequence[Pieces]:
        """Addresses of blocks first to last - 1, each as the pieces K0 V0 K1 V1 ...

        Valid while this cache lives and until it grows.
        """
        tokens = self.shape.block_tokens
        whole = len(self._block_layers[0].key_memory) // tokens
        tensors = [
            memory[: whole * tokens].view(whole, tokens, *memory.shape[1:])
            for layer in self._block_layers
            for memory in (layer.key_memory, layer.value_memory)
        ]
        return paged_blocks(tensors, range(first, last))


def probe_shape(model: Any, block_tokens: int) -> KvShape:
    """Run one token through the model and see what it caches.

    Raises UnsupportedModel when it caches something else than one K and one V tensor per layer.
    """
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    layers = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.keys.shape[::2] != (1, 1):
            raise UnsupportedModel(
                f"layer {index} caches {type(layer).__name__}, not keys and values of every token"
            )
        layers.append(LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    if not layers:
        raise UnsupportedModel(f"{type(model).__name__} filled no cache")
    dtypes = {tensor.dtype for layer in cache.layers for tensor in (layer.keys, layer.values)}
    if len(dtypes) != 1:
        raise UnsupportedModel(f"layers cache different types: {sorted(map(str, dtypes))}")
    return KvShape(tuple(layers), dtypes.pop(), block_tokens)
