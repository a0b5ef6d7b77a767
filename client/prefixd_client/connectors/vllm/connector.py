"""The class that vLLM loads: `kv_connector_module_path` names this package, `kv_connector` this class.

It translates between vLLM's interface and the connector's two sides, and decides nothing. vLLM makes one
object per process: role SCHEDULER in the engine's core, role WORKER in each worker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.version import __version__ as vllm_version

from prefixd_client.client import Client
from prefixd_client.options import ClientOptions
from prefixd_client.values import Tier

from ..engine_settings import UnsupportedEngine
from .daemon_cache import DaemonCache
from .engine import (
    attention_isa,
    attention_layers,
    group_layer_names,
    kv_cache_layout,
    uses_blocks_early,
    worker_device,
    worker_ranks,
)
from .identity import ENGINE_NAME, agreed_facts, engine_weights, namespace_spec
from .kv_copies import open_copies
from .metadata import StepJobs, StepOutcomes, WorkerHello
from .namespaces import Namespaces
from .refusals import refuse_unsupported_engine
from .scheduler import SchedulerSide
from .settings import Settings
from .shards import ShardPlan
from .stats import PrefixdMetrics, PrefixdStats
from .versions import hit_source_names, refuse_unsupported_version
from .worker import WorkerSide

_LOG = logging.getLogger(__name__)


class PrefixdConnector(KVConnectorBase_V1, SupportsHMA):
    """Serves a vLLM engine from the node's prefix cache, and fills it.

    Raises:
        UnsupportedEngine: at construction, when the engine's configuration cannot be served.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported_version(vllm_version)
        refuse_unsupported_engine(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.from_extra_config(transfer.kv_connector_extra_config or {})
        if not self._settings.async_load and uses_blocks_early(vllm_config):
            _LOG.warning(
                "prefixd: async_load = false is ignored; it needs --no-enable-prefix-caching and "
                "--no-async-scheduling, without pipeline parallelism"
            )
            self._settings = replace(self._settings, async_load=True)
        self._plan = ShardPlan.of(vllm_config)
        device_uuid = "" if role == KVConnectorRole.SCHEDULER else worker_device(self._settings)
        self._client = self._connected(self._settings.client_options(device_uuid))
        self._namespaces = Namespaces(self._client)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._hello: WorkerHello | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._weights = engine_weights(vllm_config, self._settings)
            self._scheduler = SchedulerSide(
                self._settings,
                int(vllm_config.cache_config.block_size),
                self._plan.world_size,
                DaemonCache(self._namespaces),
                tell_events=_events_wanted(vllm_config),
            )
        else:
            pipeline_rank, tensor_rank = worker_ranks()
            self._worker = WorkerSide(
                self._client,
                self._settings,
                group_layer_names(kv_cache_config),
                self._plan.shard_of(pipeline_rank, tensor_rank),
                writes=self._plan.writes(tensor_rank),
                copies=partial(open_copies, device_uuid=device_uuid),
            )
            self._device_uuid = device_uuid

    # -- what kind of connector this is -------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a miss later."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrefixdStats:
        """Counters as they come from a worker."""
        return PrefixdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrefixdMetrics:
        """The counters on /metrics."""
        return PrefixdMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler ----------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers have told how their memory looks: the namespace can be opened."""
        facts = agreed_facts({rank: hello.facts for rank, hello in metadata.items()})
        self._read_for({rank: hello.device_uuid for rank, hello in metadata.items()})
        spec = namespace_spec(
            self._vllm_config,
            facts,
            self._plan,
            self._settings,
            weights=self._weights,
            version=vllm_version,
            kv_cache_layout=kv_cache_layout(self._vllm_config, self._kv_cache_config),
        )
        self._namespaces.open(spec)
        self._side.use_namespace(spec)
        _LOG.info("prefixd: serving %s from %s", spec.model_id, self._settings.address)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Checks that prefix hashes are of whole blocks."""
        tokens, hashed = self._vllm_config.cache_config.block_size, gpu_block_pool.hash_block_size
        if tokens != hashed:
            raise UnsupportedEngine(
                f"prefix hashes are of {hashed} tokens and blocks of {tokens}",
                "leave --prefix-match-unit away",
            )

    def on_new_request(self, request: Any) -> None:
        """A request has been queued."""
        self._side.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the engine's own; None: ask again."""
        return self._side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated, also for tokens to load."""
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else ()
        self._side.allocated(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Tokens to load by the tier that holds them."""
        names = hit_source_names()
        if names is None:
            return {}
        by_tier = {Tier.HBM: names.DEVICE, Tier.DRAM: names.HOST, Tier.NVME: names.DISK}
        sources = self._side.hit_sources(request, num_external_tokens)
        found: dict[Any, int] = {}
        for tier, tokens in sources.items():
            name = by_tier.get(tier, names.EXTERNAL_UNSPECIFIED)
            found[name] = found.get(name, 0) + tokens
        return found

    def build_connector_meta(self, scheduler_output: Any) -> StepJobs:
        """The step's jobs."""
        return self._side.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have done."""
        outcomes = connector_output.kv_connector_worker_meta
        self._side.outcomes(
            outcomes if isinstance(outcomes, StepOutcomes) else None, connector_output.invalid_block_ids
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; True keeps its blocks until the workers report it."""
        return self._side.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, with the blocks of each KV cache group; there is one."""
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """vLLM's caches are void, as after an in-place update of weights: go on in a namespace of our own."""
        base = self._side.namespace
        if base is not None:
            original, _, _ = base.weights_fingerprint.partition("+reset:")
            self._side.use_namespace(replace(base, weights_fingerprint=f"{original}+reset:{uuid4().hex}"))
        return True

    # -- worker -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The KV cache is allocated."""
        layers = attention_layers(self._vllm_config)
        isa = attention_isa(self._vllm_config, self._kv_cache_config)
        facts = self._hands.register(kv_caches, layers, isa, int(self._kv_cache_config.num_blocks))
        self._hello = WorkerHello(facts, self._device_uuid)

    def get_handshake_metadata(self) -> WorkerHello | None:
        """How this worker's KV cache looks."""
        return self._hello

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the step touches memory."""
        assert isinstance(kv_connector_metadata, StepJobs)
        self._hands.fence(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Before the forward pass when a load belongs into the step, after it otherwise."""
        self._hands.start_loads(self._jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are whole before the forward pass that reads them."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: whole blocks are saved after the step that filled them."""

    def wait_for_save(self) -> None:
        """After the forward pass, and on empty steps: hands the step's saves to their thread."""
        self._hands.start_saves(self._jobs)

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002 - vLLM's signature; held requests come with the jobs
    ) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose blocks may be freed, requests whose blocks are loaded)."""
        self._hands.give_way(self._jobs)
        sent, received = self._hands.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were to be loaded and must be computed."""
        return self._hands.take_bad_blocks()

    def build_connector_worker_meta(self) -> StepOutcomes | None:
        """What ended, for the scheduler's side."""
        return self._hands.take_outcomes()

    # -- both ---------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PrefixdStats | None:
        """Counts since the last call."""
        side = self._scheduler or self._worker
        counts = side.tallies.take() if side is not None else {}
        return PrefixdStats(data=counts) if counts else None

    def take_events(self) -> Iterable[Any]:
        """What this engine's saves have put into the cache, and what was found lost."""
        return self._side.events.take()

    def shutdown(self) -> None:
        """Gives back leases, ends threads, closes the session."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._client.close()
        if self._worker is not None:
            self._worker.close()

    # -- inside -------------------------------------------------------------------------------------

    def _connected(self, options: ClientOptions) -> Client:
        return Client(
            self._settings.address,
            instance_id=str(self._vllm_config.kv_transfer_config.engine_id),
            engine_name=ENGINE_NAME,
            options=options,
        )

    def _read_for(self, devices: Mapping[tuple[int, int], str]) -> None:
        """Acquires for these GPUs of the ranks from now on.

        A block lies on one GPU at most. Where ranks on several share a shard, it is read from host memory.
        """
        of_shard: dict[int, set[str]] = {}
        for rank, device in devices.items():
            of_shard.setdefault(self._plan.shard_of(*rank), set()).add(device)
        named = tuple(sorted(set().union(*of_shard.values()) - {""}))
        if named and all(len(several) == 1 for several in of_shard.values()):
            self._client.close()
            self._client = self._connected(self._settings.client_options(redeemer_devices=named))
            self._namespaces.use(self._client)

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler's hook on a worker's connector"
        return self._scheduler

    @property
    def _hands(self) -> WorkerSide:
        assert self._worker is not None, "a worker's hook on a scheduler's connector"
        return self._worker

    @property
    def _jobs(self) -> StepJobs:
        jobs = self._get_connector_metadata()
        assert isinstance(jobs, StepJobs)
        return jobs


def _events_wanted(vllm_config: Any) -> bool:
    """Whether the operator has turned vLLM's KV events on."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)
