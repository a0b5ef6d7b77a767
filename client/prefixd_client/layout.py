"""Where a block's bytes lie in the engine's memory: pieces that make up one block, in order.

The client never asks what the bytes mean. A piece is anything with the buffer protocol (contiguous), an
(address, size in bytes) pair, or a contiguous CPU tensor (`data_ptr()` and `nbytes`). The caller keeps the
memory alive and unchanged for as long as the call that got it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import addressof, c_char
from typing import Any, Protocol, TypeAlias

import numpy as np

from .errors import InvalidArgument


class CpuTensor(Protocol):
    """The part of a torch tensor that the client needs."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def data_ptr(self) -> int:
        """Address of the first byte."""
        ...

    def is_contiguous(self) -> bool:
        """Whether the bytes lie without gaps."""
        ...


Buffer: TypeAlias = bytes | bytearray | memoryview | np.ndarray[Any, Any]
Piece: TypeAlias = Buffer | CpuTensor | tuple[int, int]
BlockMemory: TypeAlias = Piece | Sequence[Piece]
"""One block: a piece, or several that follow each other."""

Pieces: TypeAlias = tuple[tuple[int, int], ...]
"""(address, size in bytes) of each piece, in order."""

_REMEDY = "give contiguous CPU memory: a buffer, an (address, nbytes) pair or a tensor"


def pieces_of(memory: BlockMemory, block_bytes: int, *, writable: bool) -> Pieces:
    """Addresses of one block's pieces.

    Raises InvalidArgument when a piece is not contiguous CPU memory, is read-only though it must be
    written, or when the pieces do not add up to block_bytes.
    """
    if isinstance(memory, (list, tuple)) and not (len(memory) == 2 and isinstance(memory[0], int)):
        pieces = tuple([_piece(piece, writable) for piece in memory])
        size = sum([nbytes for _, nbytes in pieces])
    else:
        pieces = (_piece(memory, writable),)
        size = pieces[0][1]
    if size != block_bytes:
        raise InvalidArgument(
            "block",
            f"{size} bytes",
            f"a block of this namespace and KV group has {block_bytes} bytes",
            _REMEDY,
        )
    return pieces


def paged_blocks(
    layers: Sequence[CpuTensor | np.ndarray[Any, Any]], block_ids: Iterable[int]
) -> list[Pieces]:
    """Blocks of a paged KV cache: one tensor per layer whose first dimension is the block.

    Returns, for each block id, one piece per layer in the order given. Each tensor must be contiguous, so
    that one block of one layer is one piece.
    """
    bases = []
    for layer in layers:
        count = len(layer)  # type: ignore[arg-type]  # torch tensors and arrays both have a length
        address, nbytes = _piece(layer, writable=False)
        bases.append((address, nbytes // max(1, count), count))
    blocks = []
    for block in block_ids:
        if not all(0 <= block < count for _, _, count in bases):
            raise InvalidArgument(
                "block_ids", block, "must lie inside every layer's tensor", "check the block table"
            )
        blocks.append(tuple((address + block * nbytes, nbytes) for address, nbytes, _ in bases))
    return blocks


def _piece(piece: Any, writable: bool) -> tuple[int, int]:
    """Address and size of one piece."""
    if isinstance(piece, tuple):
        address, nbytes = piece
        if address <= 0 or nbytes <= 0:
            raise InvalidArgument("block", piece, "address and size must be above 0", _REMEDY)
        return address, nbytes
    try:
        # The short way for writable buffers: a third of the time that asking numpy takes.
        return addressof(c_char.from_buffer(piece)), memoryview(piece).nbytes
    except (TypeError, ValueError, BufferError):
        return _tensor(piece) if hasattr(piece, "data_ptr") else _array(piece, writable)


def _array(piece: Any, writable: bool) -> tuple[int, int]:
    """Address and size of a buffer that is read-only, or that cannot be used; then InvalidArgument."""
    try:
        array = np.frombuffer(piece, dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument("block", type(piece).__name__, str(error), _REMEDY) from error
    if writable and not array.flags.writeable:
        raise InvalidArgument("block", type(piece).__name__, "must be writable to load into", _REMEDY)
    return array.ctypes.data, array.nbytes


def _tensor(tensor: CpuTensor) -> tuple[int, int]:
    """Address and size of a tensor."""
    device = getattr(tensor, "device", None)
    if not tensor.is_contiguous() or getattr(device, "type", "cpu") != "cpu":
        raise InvalidArgument("block", f"tensor on {device}", "must be contiguous and on the CPU", _REMEDY)
    return tensor.data_ptr(), tensor.nbytes
