"""The plain model: what must be true of the node, in dictionaries.

It knows blocks, leases and processes, and no slots, trees or policies. Which
blocks are evicted for space is the node's choice: the model is told and checks
that the choice was allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd_server.base.types import Extent

Key = tuple[str, str, int, int, bytes]
"""(tenant, model id, epoch, shard, prefix hash)"""
Place = tuple[int, int]
"""(segment id, offset)"""


@dataclass
class Block:
    """One block. `writer` is the token of the lease that still writes it."""

    parent: Key | None
    writer: bytes | None
    pinned: bool = False
    scribbled: bool = False


@dataclass
class Writer:
    """A write lease."""

    token: bytes
    session_id: bytes
    tenant: str
    model_id: str
    epoch: int
    keys: list[Key]
    extents: tuple[Extent, ...]
    expires_at: float
    committed: int = 0
    quarantined: bool = False

    @property
    def open_keys(self) -> list[Key]:
        """Blocks not committed yet."""
        return self.keys[self.committed :]

    @property
    def open_places(self) -> set[Place]:
        """Slots not committed yet."""
        return set(places(self.extents)[self.committed :])


@dataclass
class Reader:
    """A read lease: per open shard the holder, the keys and where they lie."""

    token: bytes
    tenant: str
    instance_id: str
    model_id: str
    expires_at: float
    shards: dict[int, bytes]
    keys: dict[int, list[Key]]


@dataclass
class PlainModel:
    """See the module."""

    blocks: dict[Key, Block] = field(default_factory=dict)
    writers: dict[bytes, Writer] = field(default_factory=dict)
    readers: dict[bytes, Reader] = field(default_factory=dict)
    epochs: dict[tuple[str, str], int] = field(default_factory=dict)

    def kept(self, key: Key) -> bool:
        """Committed, and not forgotten."""
        block = self.blocks.get(key)
        return block is not None and block.writer is None

    def visible(self, key: Key) -> bool:
        """Kept, and all its ancestors too."""
        at: Key | None = key
        while at is not None:
            if not self.kept(at):
                return False
            at = self.blocks[at].parent
        return True

    def leading_visible(self, keys: list[Key]) -> int:
        """Length of the prefix of the run that readers may see."""
        for index, key in enumerate(keys):
            if not self.visible(key):
                return index
        return len(keys)

    def forget(self, key: Key) -> set[Key]:
        """Forgets a block and everything below; what went."""
        gone = {key}
        while more := {k for k, block in self.blocks.items() if block.parent in gone} - gone:
            gone |= more
        for each in gone:
            self.blocks.pop(each, None)
        return gone

    def leased(self) -> set[Key]:
        """Blocks under a read lease."""
        return {
            key
            for reader in self.readers.values()
            for shard in reader.shards
            for key in reader.keys.get(shard, [])
        }

    def quarantined_places(self) -> set[Place]:
        """Slots that a process may still write to without a lease."""
        return {
            place for writer in self.writers.values() if writer.quarantined for place in writer.open_places
        }

    def writing_places(self) -> set[Place]:
        """Slots that a process writes to under a lease."""
        return {
            place
            for writer in self.writers.values()
            if not writer.quarantined
            for place in writer.open_places
        }

    def fail_writer(self, writer: Writer) -> None:
        """Its open blocks are forgotten, with what hangs below."""
        for key in writer.open_keys:
            block = self.blocks.get(key)
            if block is not None and block.writer == writer.token:
                self.forget(key)

    def end_writer(self, writer: Writer) -> None:
        """Nobody writes any more."""
        self.fail_writer(writer)
        del self.writers[writer.token]

    def quarantine(self, writer: Writer) -> None:
        """Nobody vouches for it."""
        self.fail_writer(writer)
        writer.quarantined = True

    def expire(self, now: float) -> None:
        """Leases whose time is over."""
        for reader in [r for r in self.readers.values() if r.expires_at <= now]:
            del self.readers[reader.token]
        for writer in list(self.writers.values()):
            if writer.expires_at <= now and not writer.quarantined:
                self.quarantine(writer)


def places(extents: tuple[Extent, ...]) -> list[Place]:
    """Every slot of the extents, in run order."""
    return [
        (extent.segment_id, extent.offset_bytes + index * extent.stride_bytes)
        for extent in extents
        for index in range(extent.block_count)
    ]
