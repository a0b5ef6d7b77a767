"""Arrays in reserved memory: full length from the start, paid for only where touched.

A column that may hold ten million rows is one anonymous mapping of that length.
Growing it touches new pages and copies nothing, so views and memoryviews of it
stay valid for ever. Who uses the array keeps count of how much it has touched.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAP_NORESERVE = 0x4000
"""Linux: the mapping is not charged against the commit limit. Not named by Python 3.11's mmap."""


def reserve(dtype: DTypeLike, shape: int | tuple[int, ...], *, huge_pages: bool = False) -> NDArray[Any]:
    """A zeroed, writable, C-contiguous array whose pages come into being when first touched.

    Args:
        dtype: of the elements.
        shape: the full length that the array may ever need; at least one element.
        huge_pages: asks for transparent huge pages: for dense arrays that are
            read at random. Without, they are refused, since one touched byte of
            a sparse array would cost 2 MiB.

    Raises:
        OSError: no address space left.
    """
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    length_bytes = count * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, length_bytes, flags=flags)
    # A kernel built without huge pages has nothing to give and nothing to refuse.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


def release(array: NDArray[Any], first: int, count: int) -> None:
    """Gives the memory of whole pages among `count` elements back to the system; they read as zero then.

    Piece by piece, since giving a large array back at once takes milliseconds.

    Args:
        array: as reserve() made it, one-dimensional.
    """
    holder: Any = array
    while not isinstance(holder, memoryview):
        holder = holder.base
    start = -(-first * array.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (first + count) * array.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        cast("mmap.mmap", holder.obj).madvise(mmap.MADV_DONTNEED, start, end - start)
