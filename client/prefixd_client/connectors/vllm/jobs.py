"""What a worker is to do: plain values, which vLLM pickles with a step's metadata."""

from __future__ import annotations

from dataclasses import dataclass

from prefixd_client.namespace import NamespaceSpec


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy blocks of a lease into the engine's KV cache.

    block_ids are the engine's blocks for consecutive blocks of the lease, the first for its block `start`.
    """

    job_id: int
    request_id: str
    namespace: NamespaceSpec
    token: bytes
    start: int
    block_ids: tuple[int, ...]
    in_step: bool
    """Load before this step's forward pass (True), or between steps and report when done (False)."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy computed blocks of a run into the cache; hashes and block_ids go together.

    parent_hash is the block before the run, empty at the root.
    """

    job_id: int
    request_id: str
    namespace: NamespaceSpec
    parent_hash: bytes
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    recompute_cost_s: float | None
