"""The protocol of a medium: slots and bytes, never keys.

A medium is addressed by segment index and byte offset. Its calls block and
release the GIL while they work; only mover threads (movers.py) call them,
never the event loop.
"""

from __future__ import annotations

from typing import Protocol

from prefixd_server.base.types import Tier


class Medium(Protocol):
    """Reads and writes whole extents of one tier's segments."""

    @property
    def tier(self) -> Tier:
        """The tier that this medium backs."""
        ...

    @property
    def segment_bytes(self) -> int:
        """Bytes of every segment."""
        ...

    def read(self, segment_index: int, offset_bytes: int, target: memoryview) -> None:
        """Fills `target` (writable, contiguous) from the segment. Raises OSError."""
        ...

    def write(self, segment_index: int, offset_bytes: int, source: memoryview) -> None:
        """Writes `source` (contiguous) to the segment. Raises OSError."""
        ...

    def view(self, segment_index: int, offset_bytes: int, length_bytes: int) -> memoryview | None:
        """The bytes themselves where the medium is addressable (DRAM), else None."""
        ...
