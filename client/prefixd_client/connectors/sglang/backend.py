"""The storage backend that SGLang's dynamic loader makes: its calls to the node's prefix cache.

SGLang's storage threads call it at the same time. No call raises: whatever goes wrong is a miss or an unsaved
block, and is logged. What cannot be served at all is refused when the storage is attached.
"""

# ruff: noqa: ARG002 - the signatures are SGLang's

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from prefixd_client.client import Client
from prefixd_client.errors import DaemonRefused

from . import weight_updates
from .blocks import RankBlocks
from .chains import Chains, hash_of
from .engine import EngineFacts
from .host_pool import HostPool
from .identity import ENGINE_NAME, engine_weights, namespace_spec, shard_of
from .refusals import refuse_further_pool, refuse_unsupported_model, refuse_unsupported_storage
from .settings import Settings
from .stats import Tallies
from .versions import refuse_unsupported_version

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class PrefixdHiCache(HiCacheStorage):
    """HiCacheStorage over the prefix cache; one per rank. See SGLang for what each call means.

    Args:
        storage_config: SGLang's HiCacheStorageConfig.
        kwargs: what the loader passes along; nothing.

    Raises:
        UnsupportedEngine: from here and from the register calls: the engine cannot be served.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        refuse_unsupported_storage(storage_config)
        self._config = storage_config
        self._settings = Settings.from_extra_config(storage_config.extra_config)
        self._facts = EngineFacts.read()
        refuse_unsupported_version(self._facts.version)
        refuse_unsupported_model(self._facts.speculative_algorithm, self._facts.is_multimodal)
        weight_updates.watch()
        self._updates_before = weight_updates.update_count()
        self._weights = engine_weights(self._facts, self._settings)
        self._chains = Chains()
        self._told: set[str] = set()
        self._client: Client | None = None
        self._pool: HostPool
        self._blocks: RankBlocks | None = None
        self._tallies = Tallies(0)
        self._is_attached = False

    # -- attaching ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool is there: opens the namespace."""
        super().register_mem_pool_host(mem_pool_host)
        self._pool = HostPool(mem_pool_host)
        self._tallies = Tallies(self._pool.block_bytes)
        spec = namespace_spec(self._facts, self._config, self._pool, self._settings, weights=self._weights)
        self._client = Client(
            self._settings.address, engine_name=ENGINE_NAME, options=self._settings.client_options()
        )
        try:
            namespace = self._client.namespace(spec)
        except DaemonRefused:
            _LOG.exception("prefixd: the daemon does not serve this engine, which goes on without it")
            return
        self._blocks = RankBlocks(
            namespace,
            shard_of(self._config),
            wait_max_s=self._settings.wait_max_s,
            save_patience_s=self._settings.save_patience_s,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool by name. For any but the KV of every token: UnsupportedEngine while the storage is attached;
        nothing is shared any more when it comes later, as a running engine must not fail."""
        name = str(host_pool_name)
        if name != PoolName.KV.value:
            self._blocks = None
            if not self._is_attached:
                refuse_further_pool(name)
            self._tell_once(
                "pool", f"a pool {name!r} was added, which has no place in the cache: nothing is shared"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """All pools of the engine's start are known."""
        self._is_attached = True

    def close(self) -> None:
        """Detaches; what is kept stays."""
        self._blocks = None
        if self._client is not None:
            self._client.close()

    # -- runs of the host pool (zero copy) ---------------------------------------------------------

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Leading keys that are kept."""

        def count(blocks: RankBlocks) -> int:
            run = _hashes(keys)
            return blocks.kept_count(self._before(run, extra_info), run) if run else 0

        return self._guarded("batch_exists", count, 0)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Loads blocks into the host pool; True for the leading ones that came out right."""

        def load(blocks: RankBlocks) -> int:
            run = _hashes(keys)
            targets = self._pool.pieces(host_indices, len(run))
            return self._load(blocks, self._before(run, extra_info), run, targets) if run else 0

        return _leading(self._guarded("batch_get_v1", load, 0), keys)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Saves blocks of the host pool; True for the leading ones that are kept."""

        def store(blocks: RankBlocks) -> int:
            return self._store(blocks, _hashes(keys), self._pool.pieces(host_indices, len(keys)), extra_info)

        return _leading(self._guarded("batch_set_v1", store, 0), keys)

    # -- single blocks in flat tensors (copying) ---------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether the block is kept."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The block in `target_location`, a flat tensor of its size; None when it is not kept."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Each key's block, or None. A key whose parent nobody has told is sought behind those before it."""
        targets = [None] * len(keys) if target_locations is None else target_locations

        def load(blocks: RankBlocks) -> list[Any]:
            run, found = _hashes(keys), []
            for index, (block, given) in enumerate(zip(run, targets, strict=True)):
                prefix = self._chains.before(block) or [*self._chains.before(run[0]), *run[:index]]
                target = self._pool.empty_flat() if given is None else given
                loaded = self._load(blocks, prefix, [block], [self._pool.flat_pieces(target)])
                found.append(target if loaded else None)
            return found

        return self._guarded("batch_get", load, [None] * len(keys))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Saves one block whose parent a query or a save has told; whether it is kept."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Saves consecutive blocks, the first of which has a parent that was told; whether all are kept."""

        def store(blocks: RankBlocks) -> bool:
            tensors = [value.contiguous() for value in values]
            sources = [self._pool.flat_pieces(tensor) for tensor in tensors]
            return self._store(blocks, _hashes(keys), sources) == len(keys)

        return self._guarded("batch_set", store, False)

    # -- pools beside the KV: none is registered, and nothing is kept of them ------------------------

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Nothing, when a further pool is asked for."""
        if not pool_transfers:
            return PoolTransferResult(self.batch_exists(keys, extra_info), {})
        return PoolTransferResult.empty()

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Nothing."""
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Nothing."""
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    # -- the operator --------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Refused: other engines share what is kept. Blocks go with the operator's own command."""
        self._tell_once("clear", "an engine cannot clear what others share; see prefixd drop-namespace")
        return False

    def get_stats(self) -> Any:
        """What was moved since the last call; None where SGLang's metrics are off."""
        return self._tallies.take() if self._config.enable_storage_metrics else None

    # -- steps ---------------------------------------------------------------------------------------

    def _before(self, run: list[bytes], extra_info: Any) -> list[bytes]:
        """The blocks before a run, from the root: as passed, else as told earlier."""
        keys = getattr(extra_info, "prefix_keys", None)
        prefix = None if keys is None else _hashes(keys)
        self._chains.told(prefix, run)
        return self._chains.before(run[0]) if prefix is None else prefix

    def _load(self, blocks: RankBlocks, prefix: list[bytes], run: list[bytes], targets: Any) -> int:
        begin = time.monotonic()
        loaded = blocks.load(prefix, run, targets)
        self._tallies.loaded(loaded, time.monotonic() - begin)
        return loaded

    def _store(self, blocks: RankBlocks, run: list[bytes], sources: Any, extra_info: Any = None) -> int:
        if not run:
            return 0
        self._before(run, extra_info)
        parent = self._chains.parent(run[0])
        if parent is None:
            self._tell_once(
                "parent",
                "SGLang has not told which blocks come before those it saves, so they are not kept: add "
                '"hicache_storage_pass_prefix_keys": true to --hicache-storage-backend-extra-config',
            )
            return 0
        begin = time.monotonic()
        kept = blocks.store(parent, run, sources)
        self._tallies.stored(kept, time.monotonic() - begin)
        return kept

    def _guarded(self, call: str, act: Callable[[RankBlocks], T], miss: T) -> T:
        """What `act` returns; the miss when the cache does not serve, or whatever goes wrong."""
        blocks = self._blocks
        if blocks is None:
            return miss
        if weight_updates.update_count() != self._updates_before:
            self._tell_once(
                "weights",
                "the weights were updated in place, so nothing is shared any more: restart the engine, or "
                "detach the storage and attach it with weights_revision",
            )
            return miss
        try:
            return act(blocks)
        except (
            Exception
        ):  # the outermost seam: an exception would end SGLang's storage thread in some releases
            _LOG.exception("prefixd: %s failed, which counts as a miss", call)
            return miss

    def _tell_once(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _LOG.warning("prefixd: %s", message)


def _hashes(keys: Sequence[str]) -> list[bytes]:
    return [hash_of(key) for key in keys]


def _leading(count: int, keys: Sequence[str]) -> list[bool]:
    return [index < count for index in range(len(keys))]
