"""KV events: tells vLLM's event stream which blocks the cache keeps, for routers that follow it.

Told are the saves of this engine, and blocks that turned out to be lost when they were asked for. What other
engines save, and what the daemon evicts, is not: a router must take these events as hints, as it must anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from .jobs import SaveJob

MEDIUM = "CPU"
"""vLLM's word for host memory, where every save goes first."""


class KvEvents:
    """One engine's events, on the scheduler's thread.

    Args:
        block_tokens: tokens per block.
        enabled: whether anybody listens; nothing is kept otherwise.
    """

    def __init__(self, block_tokens: int, *, enabled: bool) -> None:
        self._block_tokens = block_tokens
        self._enabled = enabled
        self._planned: dict[int, tuple[SaveJob, tuple[int, ...], Any]] = {}
        self._events: list[Any] = []

    def planned(self, job: SaveJob, request: Any, first_block: int) -> None:
        """A save was decided, of the request's blocks from this on; its tokens are kept until it is over."""
        if self._enabled:
            begin = first_block * self._block_tokens
            tokens = request.all_token_ids[begin : begin + len(job.hashes) * self._block_tokens]
            self._planned[job.job_id] = (job, tuple(tokens), request.lora_request)

    def saved(self, job_id: int, kept: int) -> None:
        """A save is over: so many leading blocks are kept."""
        planned = self._planned.pop(job_id, None)
        if planned is None or not kept:
            return
        job, tokens, lora = planned
        tokens = tokens[: kept * self._block_tokens]
        self._events.append(_stored(job.hashes[:kept], job.parent_hash, tokens, lora, self._block_tokens))

    def lost(self, hashes: Sequence[bytes]) -> None:
        """Blocks that were promised could not be loaded."""
        if self._enabled and hashes:
            self._events.append(_removed(hashes))

    @property
    def waiting_count(self) -> int:
        """Saves that were decided and are not over."""
        return len(self._planned)

    def take(self) -> list[Any]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def _stored(
    hashes: Sequence[bytes], parent_hash: bytes, tokens: Sequence[int], lora: Any, block_tokens: int
) -> Any:
    return BlockStored(
        block_hashes=[_external(key) for key in hashes],
        parent_block_hash=_external(parent_hash) if parent_hash else None,
        token_ids=list(tokens),
        block_size=block_tokens,
        lora_id=None if lora is None else int(lora.lora_int_id),
        medium=MEDIUM,
        lora_name=None if lora is None else str(lora.lora_name),
    )


def _removed(hashes: Sequence[bytes]) -> Any:
    return BlockRemoved(block_hashes=[_external(key) for key in hashes], medium=MEDIUM)


def _external(key: bytes) -> Any:
    """A hash as vLLM publishes it: bytes, or 64 bits of them where the operator wants integers."""
    return maybe_convert_block_hash(BlockHash(key))
