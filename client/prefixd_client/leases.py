"""The leases of the sync client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from .control import Control
from .holds import ReadHold, WriteHold
from .layout import BlockMemory
from .namespace import NamespaceSpec
from .operations import Call, WriteGrant
from .values import Committed


class ReadLease(ReadHold):
    """A hold on the leading blocks of a run that hit; see ReadHold for its attributes. Use it with `with`."""

    def load(
        self,
        targets: Sequence[BlockMemory],
        shard: int = 0,
        kv_group: int = 0,
        *,
        start: int = 0,
        stream: int = 0,
    ) -> int:
        """Copies blocks into the engine's memory and verifies them there: see ReadHold.copy_out."""
        return self.copy_out(targets, shard, kv_group, start, stream)

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class WriteLease(WriteHold):
    """A hold on the slots of the blocks of a run that are to be written; see WriteHold for its attributes."""

    def __init__(
        self,
        control: Control,
        spec: NamespaceSpec,
        granted: WriteGrant,
        block_bytes: int,
        run: Callable[[Call[Committed]], Committed],
    ) -> None:
        super().__init__(control, spec, granted, block_bytes)
        self._run = run

    def store(
        self, sources: Sequence[BlockMemory], blocks: Sequence[int] | None = None, *, stream: int = 0
    ) -> Committed:
        """Checksums and copies blocks, then commits them, in order. May be called in parts.

        Args:
            sources: memory of the next reserved blocks; it must not change until this returns.
            blocks: their indexes in the run, as a check; they must be the next of reserved_indexes.
            stream: the engine's CUDA stream, for what is on a GPU.

        Returns:
            What became of them. Dropped also when the lease ran out or the daemon is away; the rest of the
            lease is then given up.

        Raises:
            InvalidArgument: more sources than reserved blocks, other blocks than the next, wrong sizes.
        """
        return self.settle(self._run(self.copy_in(sources, blocks, stream)))

    def __enter__(self) -> WriteLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
