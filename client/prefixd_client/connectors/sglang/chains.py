"""Which block comes before which: SGLang's keys are chained digests, and a digest does not tell its parent.

The daemon is asked for runs from their root, and keeps a block only below its parent. Where SGLang passes the
keys before a call's own, all is known. The older calls (get, set and their like) pass none; for them it is
remembered what other calls have told. A block whose parent nobody has told cannot be kept: the cache would
have to guess.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from prefixd_client.errors import InvalidArgument

KEY_BYTES = 32
REMEMBERED_BLOCK_COUNT_MAX = 65_536
"""10 MB; the blocks told longest ago are forgotten beyond it."""
ROOT = b""


def hash_of(key: str) -> bytes:
    """A key's digest. Raises InvalidArgument when it is not 64 hexadecimal digits."""
    try:
        digest = bytes.fromhex(key)
    except ValueError:
        digest = b""
    if len(digest) != KEY_BYTES:
        raise InvalidArgument("key", key, "must be 64 hexadecimal digits", "use SGLang's own keys")
    return digest


class Chains:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parent_of: OrderedDict[bytes, bytes] = OrderedDict()

    def told(self, prefix: Sequence[bytes] | None, run: Sequence[bytes]) -> None:
        """A run, and all blocks before it: an empty sequence at the root, None when they were not passed."""
        with self._lock:
            if run and prefix is not None:
                self._remember(run[0], prefix[-1] if prefix else ROOT)
            for parent, block in pairwise(run):
                self._remember(block, parent)
            while len(self._parent_of) > REMEMBERED_BLOCK_COUNT_MAX:
                self._parent_of.popitem(last=False)

    def parent(self, block: bytes) -> bytes | None:
        """The block before this one; empty at the root, None when nobody has told."""
        with self._lock:
            return self._parent_of.get(block)

    def before(self, block: bytes) -> list[bytes]:
        """All blocks before this one, from the root, as far as they were told."""
        found: list[bytes] = []
        with self._lock:
            while parent := self._parent_of.get(block):
                found.append(parent)
                block = parent
        found.reverse()
        return found

    def _remember(self, block: bytes, parent: bytes) -> None:
        self._parent_of[block] = parent
        self._parent_of.move_to_end(block)
