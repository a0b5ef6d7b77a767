"""Gather and scatter between a run and a paged cache: one contract for every device of torch."""

from __future__ import annotations

import pytest
import torch
from prefixd_client import InvalidArgument
from prefixd_client.device_paged import gather, scatter

CACHE_BLOCKS = 10
RUN = [7, 2, 9]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def layers_of(device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """As vLLM shapes them: [blocks, K and V, tokens, heads, dim]; the second layer is narrower."""
    torch.manual_seed(0)
    shapes = [(CACHE_BLOCKS, 2, 16, 2, 8), (CACHE_BLOCKS, 2, 16, 1, 8)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def block_bytes(layers: list[torch.Tensor]) -> int:
    return sum(layer[0].nbytes for layer in layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gathered_block_is_the_layers_parts_in_order(device: str, dtype: torch.dtype) -> None:
    layers = layers_of(device, dtype)
    blocks = torch.zeros(len(RUN), block_bytes(layers), dtype=torch.uint8, device=device)
    gather(layers, torch.tensor(RUN, device=device), blocks)
    for row, block in enumerate(RUN):
        expected = torch.cat([layer[block].contiguous().view(-1).view(torch.uint8) for layer in layers])
        assert torch.equal(blocks[row], expected)


def test_scatter_undoes_gather_and_touches_nothing_else(device: str) -> None:
    layers, ids = layers_of(device), torch.tensor(RUN, device=device)
    before = [layer.clone() for layer in layers]
    blocks = torch.zeros(len(RUN), block_bytes(layers), dtype=torch.uint8, device=device)
    gather(layers, ids, blocks)
    for layer in layers:
        layer[ids] = 0
    scatter(blocks, layers, ids)
    assert all(torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))


@pytest.mark.parametrize(("rows", "more"), [(2, 0), (3, 1)])
def test_a_run_of_another_shape_is_refused(device: str, rows: int, more: int) -> None:
    layers = layers_of(device)
    blocks = torch.zeros(rows, block_bytes(layers) + more, dtype=torch.uint8, device=device)
    for call in (lambda ids: gather(layers, ids, blocks), lambda ids: scatter(blocks, layers, ids)):
        with pytest.raises(InvalidArgument, match="one row a block id"):
            call(torch.tensor(RUN, device=device))
