"""The prefix hash "sha256_u32le", for engines that have none of their own.

    h[-1] = sha256(b"prefixd-prefix-v1\\n" + seed)
    h[i]  = sha256(h[i-1] + tokens of block i as u32 little-endian + extra[i])

Only full blocks are hashed. Put `sha256_u32le` and the seed into the NamespaceSpec. A block's extra bytes
name what its KV depends on besides tokens (an image, an adapter); None and b"" are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidArgument

HASH_ALGORITHM = "sha256_u32le"
HASH_BYTES = 32
_ROOT = b"prefixd-prefix-v1\n"


def chain_hashes(
    token_ids: Sequence[int] | NDArray[Any],
    block_tokens: int,
    *,
    seed: bytes = b"",
    extra: Sequence[bytes | None] | None = None,
) -> list[bytes]:
    """Prefix hashes of all full blocks of a token sequence, 32 bytes each.

    Args:
        token_ids: ids of 0 to 2**32 - 1.
        block_tokens: tokens per block, 1 or more.
        seed: of the chain; the namespace's hash_seed.
        extra: bytes per block, one entry for each full block.

    Raises:
        InvalidArgument: an id out of range, block_tokens below 1, or extra of another length.
    """
    if block_tokens < 1:
        raise InvalidArgument(
            "block_tokens", block_tokens, "must be 1 or more", "use the namespace's block_tokens"
        )
    tokens = np.asarray(token_ids)
    block_count = len(tokens) // block_tokens
    if extra is not None and len(extra) != block_count:
        raise InvalidArgument("extra", len(extra), f"needs {block_count} entries", "give one per full block")
    if block_count == 0:
        return []
    if tokens.dtype.kind not in "iu" or int(tokens.min()) < 0 or int(tokens.max()) >= 1 << 32:
        raise InvalidArgument(
            "token_ids", tokens.dtype, "ids must be integers of 0 to 2**32 - 1", "check the tokenizer"
        )
    packed = memoryview(tokens[: block_count * block_tokens].astype("<u4").tobytes())
    block_bytes = 4 * block_tokens
    parent = hashlib.sha256(_ROOT + seed).digest()
    hashes = []
    for index in range(block_count):
        digest = hashlib.sha256(parent)
        digest.update(packed[index * block_bytes : (index + 1) * block_bytes])
        if extra is not None:
            digest.update(extra[index] or b"")
        parent = digest.digest()
        hashes.append(parent)
    return hashes
