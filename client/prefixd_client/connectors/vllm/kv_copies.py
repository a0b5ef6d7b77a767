"""Copies between the cache's leases and one worker's KV cache: one contract for host memory and for a GPU.

Loads and saves have one each, on a thread of their own. What the engine has computed, or still reads, is
behind a mark that its own thread sets: a copy begins behind its mark, and nothing else is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixd_client.device_driver import DeviceFault, Driver
from prefixd_client.leases import ReadLease, WriteLease
from prefixd_client.operations import Call
from prefixd_client.values import Committed

from ..engine_settings import UnsupportedEngine
from .device_copies import STAGING_BYTES, DeviceCopies
from .kv_memory import KvMemory

PART_BYTES = 32 << 20
"""Copied between two looks at whether a save was called off: 3 to 5 ms."""


class KvCopies(Protocol):
    """Of one thread, except mark() and close()."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    @property
    def part_count(self) -> int:
        """Most blocks of one copy_in()."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be copied any more: everything is a miss."""
        ...

    def mark(self) -> int:
        """On the engine's thread: what it has begun to compute so far. Each mark goes to one begin()."""
        ...

    def begin(self, mark: int) -> None:
        """Returns when what lies before the mark is done."""
        ...

    def load(self, lease: ReadLease, shard: int, start: int, block_ids: Sequence[int]) -> int:
        """Copies blocks of a lease from `start` on into these of the KV cache.

        Returns how many of the first are there, and verified. The others hold anything; what the engine
        writes to them from now on stays.
        """
        ...

    def copy_in(
        self, lease: WriteLease, indexes: Sequence[int], block_ids: Sequence[int]
    ) -> Call[Committed] | None:
        """Copies these blocks into the next slots of a lease; the Commit to send. None: nothing was copied.

        Nobody reads the blocks when it has returned.
        """
        ...

    def close(self) -> None:
        """Gives everything back; its thread has ended."""
        ...


@dataclass(frozen=True, slots=True)
class HostCopies:
    """KV in host memory: the client library copies it in place. Computing is done when a step returns."""

    memory: KvMemory
    is_lost: bool = False

    @property
    def block_bytes(self) -> int:
        """See KvCopies."""
        return self.memory.block_bytes

    @property
    def part_count(self) -> int:
        """See KvCopies."""
        return max(1, PART_BYTES // self.memory.block_bytes)

    def mark(self) -> int:
        """See KvCopies."""
        return 0

    def begin(self, mark: int) -> None:
        """See KvCopies."""

    def load(self, lease: ReadLease, shard: int, start: int, block_ids: Sequence[int]) -> int:
        """See KvCopies."""
        return lease.load(self.memory.pieces(block_ids), shard, start=start)

    def copy_in(
        self, lease: WriteLease, indexes: Sequence[int], block_ids: Sequence[int]
    ) -> Call[Committed] | None:
        """See KvCopies."""
        return lease.copy_in(self.memory.pieces(block_ids), indexes)

    def close(self) -> None:
        """See KvCopies."""


def open_copies(memory: KvMemory, device_uuid: str = "") -> KvCopies:
    """How this worker's KV cache is copied.

    Args:
        memory: the KV cache.
        device_uuid: of the GPU that holds it, if one does.

    Raises:
        UnsupportedEngine: the GPU cannot be used.
    """
    if not memory.on_device:
        return HostCopies(memory)
    from .torch_paging import TorchPaging  # noqa: PLC0415 - takes torch, which host memory does not need

    try:
        return DeviceCopies(memory, Driver(device_uuid), TorchPaging(memory))
    except DeviceFault as fault:
        raise UnsupportedEngine(
            f"KV on the GPU {device_uuid or '(unnamed)'} cannot be copied ({fault})",
            f"install cuda-bindings beside vLLM, leave {2 * STAGING_BYTES >> 20} MiB of the GPU free, and "
            "check kv_connector_extra_config.device_uuids",
        ) from fault
