"""Between a run of blocks, each in one piece, and an engine's paged KV cache, one tensor per layer.

One contract for CPU and GPU: plain indexing of torch, a launch a layer for a whole run, on torch's current
stream and the tensors' own device. A block is the layers' parts in order, each contiguous:

    blocks: uint8, shape (run, block bytes); layers: any dtype, shape (blocks in the cache, ...) each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import InvalidArgument


def gather(layers: Sequence[Any], block_ids: Any, blocks: Any) -> None:
    """Copies blocks of the paged cache into a run.

    Args:
        layers: contiguous tensors on one device.
        block_ids: int64 tensor there, shape (run,): where each block of the run lies in the cache.
        blocks: the run, written; contiguous, on the same device.

    Raises:
        InvalidArgument: the layers' parts are not blocks.shape[1] bytes together.
    """
    for layer, part in _parts(layers, block_ids, blocks):
        part.copy_(layer.index_select(0, block_ids))


def scatter(blocks: Any, layers: Sequence[Any], block_ids: Any) -> None:
    """Copies a run into blocks of the paged cache; arguments and errors as gather()'s. Each id comes once."""
    for layer, part in _parts(layers, block_ids, blocks):
        layer.index_copy_(0, block_ids, part)


def _parts(layers: Sequence[Any], block_ids: Any, blocks: Any) -> list[tuple[Any, Any]]:
    """Each layer as bytes, shape (blocks in the cache, bytes), and its part of the run."""
    views = [layer.view(layer.shape[0], -1).view(blocks.dtype) for layer in layers]
    sizes = [view.shape[1] for view in views]
    if sum(sizes) != blocks.shape[1] or blocks.shape[0] != len(block_ids):
        raise InvalidArgument(
            "blocks",
            tuple(blocks.shape),
            f"{len(block_ids)} blocks of these layers have {sum(sizes)} bytes each",
            "give one row a block id, as many bytes as a block of all layers has",
        )
    return list(zip(views, blocks.split(sizes, dim=1), strict=True))
