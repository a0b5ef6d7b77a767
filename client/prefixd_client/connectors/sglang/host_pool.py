"""Where a block lies in SGLang's host memory: the pieces that its pool names, in tensors too."""

from __future__ import annotations

from typing import Any

from prefixd_client.layout import Pieces

from ..engine_settings import UnsupportedEngine

POOLS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MLATokenToKVPoolHost")
"""Host pools that keep every token's KV and nothing else. Others pack scales, windows or states with it."""
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class HostPool:
    """SGLang's host pool of KV. Any thread: a pool does not move.

    Raises UnsupportedEngine for another kind of pool or layout.
    """

    def __init__(self, pool: Any) -> None:
        kind = type(pool).__name__
        if kind not in POOLS:
            raise UnsupportedEngine(
                f"KV lies in a {kind}, which is not the plain KV of every token",
                "serve this model without --hicache-storage-backend",
            )
        if pool.layout not in LAYOUTS:
            raise UnsupportedEngine(
                f"the host layout {pool.layout!r} is not served",
                f"choose --hicache-mem-layout {', '.join(LAYOUTS)}",
            )
        self._pool = pool
        self.block_tokens = int(pool.page_size)
        try:
            _, sizes = pool.get_page_buffer_meta(_first_block(pool))
        except ValueError as error:
            raise UnsupportedEngine(
                f"SGLang's {kind} has no zero-copy form of its layout {pool.layout!r}",
                "choose --hicache-mem-layout page_first",
            ) from error
        self._piece_count = len(sizes)
        self._interleaved = pool.layout == "layer_first" and kind.startswith("MHA")
        self.block_bytes = sum(sizes)
        self.layer_count = int(pool.layer_num)

    @property
    def dtype(self) -> str:
        """Type of the elements."""
        return str(self._pool.dtype).removeprefix("torch.")

    @property
    def layout_name(self) -> str:
        """Name of the byte layout; equal names are equal bytes. Layers are those of this pipeline stage."""
        pool = self._pool
        sizes = {
            name: getattr(pool, name)
            for name in ("head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
            if hasattr(pool, name)
        }
        shape = ",".join(f"{name}={value}" for name, value in sizes.items())
        layers = f"layers={pool.start_layer}-{pool.end_layer}/{self.layer_count}"
        return f"{type(pool).__name__};{pool.layout};{pool.storage_format_tag or ''};{layers};{shape}"

    def pieces(self, host_indices: Any, block_count: int) -> list[Pieces]:
        """Addresses of consecutive blocks; host_indices names each of their tokens.

        Raises ValueError when there are not block_tokens indices for each block.
        """
        if len(host_indices) != block_count * self.block_tokens:
            raise ValueError(
                f"{len(host_indices)} host indices for {block_count} blocks of {self.block_tokens} tokens"
            )
        if not block_count:
            return []
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        parts = list(zip(addresses, sizes, strict=True))
        step = self._piece_count
        return [tuple(parts[first : first + step]) for first in range(0, len(parts), step)]

    def flat_pieces(self, tensor: Any) -> Pieces:
        """One block in a flat tensor, as SGLang's copying calls have it, in the order of pieces().

        Layer by layer the pool names K and V of a layer one after the other; flat, all K come first.

        Raises ValueError when the tensor is not contiguous host memory of a block's size.
        """
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.nbytes != self.block_bytes:
            raise ValueError(
                f"a tensor of {tensor.nbytes} bytes on {tensor.device}: a block has {self.block_bytes} "
                "contiguous bytes of host memory"
            )
        address = tensor.data_ptr()
        if not self._interleaved:
            return ((address, self.block_bytes),)
        size, layers = self.block_bytes // self._piece_count, self.layer_count
        order = [kv * layers + layer for layer in range(layers) for kv in range(2)]
        return tuple((address + place * size, size) for place in order)

    def empty_flat(self) -> Any:
        """Room for one block."""
        return self._pool.get_dummy_flat_data_page()


def _first_block(pool: Any) -> Any:
    """Indices of the tokens of the pool's first block."""
    import torch  # noqa: PLC0415 - the engine's own

    return torch.arange(pool.page_size, dtype=torch.int64)
