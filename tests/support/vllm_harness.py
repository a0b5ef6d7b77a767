"""A vLLM engine without a model: vLLM's own scheduler, our connector, KV in memory, arithmetic for a model.

Each step does what vLLM's model runner does around the connector, in its order. The "model" writes for every
token a number that depends on all tokens up to it, and reads those of all tokens before it: a missing, stale
or foreign block is an assertion at the very step that would have read it. Replies follow from the numbers, so
the right reply is known without an engine.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefixd_client.client import Client
from prefixd_client.connectors.vllm import PrefixdConnector
from prefixd_client.connectors.vllm.kv_copies import KvCopies, open_copies
from prefixd_client.connectors.vllm.kv_memory import KvMemory
from prefixd_client.connectors.vllm.metadata import StepJobs, WorkerHello
from prefixd_client.connectors.vllm.settings import Settings
from prefixd_client.connectors.vllm.shards import ShardPlan
from prefixd_client.connectors.vllm.worker import WorkerSide
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.vllm_process import transfer_config

BLOCK_TOKENS = 32
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
KV_HEADS, HEAD_DIM = 2, 32
VOCABULARY = 4096
_MASK = (1 << 64) - 1


def next_number(number: int, token: int) -> int:
    """The model: the number of a token from that of the token before it."""
    return (number * 6364136223846793005 + token * 2654435761 + 1442695040888963407) & _MASK


def numbers_of(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The number of each token of a sequence."""
    numbers, number = [], 0
    for token in tokens:
        number = next_number(number, token)
        numbers.append(number)
    return np.array(numbers, np.uint64)


def right_reply(prompt: Sequence[int], count: int) -> list[int]:
    """What an engine that was never lied to answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(numbers_of(tokens)[-1] >> np.uint64(33)) % VOCABULARY)
    return tokens[len(prompt) :]


def model_directory(directory: Path) -> Path:
    """A model that is never loaded: its configuration."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Worker:
    """One tensor rank: its KV cache, and the connector's side for it, which the harness gives it."""

    side: WorkerSide

    device_uuid = ""
    open_copies: Callable[[KvMemory], KvCopies] = staticmethod(open_copies)

    def __init__(self, rank: int, ranks: int, block_count: int) -> None:
        heads = KV_HEADS // ranks
        self.rank = rank
        self.kv = {
            name: torch.zeros(block_count, heads, BLOCK_TOKENS, 2 * HEAD_DIM, dtype=torch.float32)
            for name in LAYERS
        }
        # A view of each layer as numbers, one part of a block per token.
        self._numbers = [
            tensor.view(torch.int64).reshape(block_count, BLOCK_TOKENS, -1).numpy().view(np.uint64)
            for tensor in self.kv.values()
        ]

    def write(self, block: int, offset: int, number: int) -> None:
        """One token's KV."""
        for layer, numbers in enumerate(self._numbers):
            numbers[block, offset, :] = np.uint64((number + self.rank + (layer << 8)) & _MASK)

    def holds(self, table: Sequence[int], numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> bool:
        """Whether the first tokens' KV in these blocks is what they wrote."""
        count = len(numbers)
        for layer, memory in enumerate(self._numbers):
            found = memory[list(table[: -(-count // BLOCK_TOKENS)])].reshape(-1, memory.shape[2])[:count]
            expected = numbers + np.uint64(self.rank + (layer << 8))
            if not (found == expected[:, None]).all():
                return False
        return True


class Harness:
    """An engine; close it.

    Args:
        socket: the daemon's.
        model: from model_directory().
        block_count: size of the KV cache.
        ranks: tensor-parallel workers, each with a client of its own.
        prefix_caching: vLLM's own prefix cache.
        worker: what its workers are.
        runs_ahead: a step is scheduled while the one before is under way, as vLLM does on GPUs.
        step_tokens: most tokens of a step.
        settings: of the connector.
    """

    def __init__(
        self,
        socket: Path,
        model: Path,
        *,
        block_count: int = 64,
        ranks: int = 1,
        prefix_caching: bool = False,
        worker: type[Worker] = Worker,
        runs_ahead: bool = False,
        step_tokens: int = 128,
        max_requests: int = 16,
        **settings: Any,
    ) -> None:
        extra = {"weights_revision": "test", "lookup_timeout_s": 5.0, "load_if_sooner": False, **settings}
        self.config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            max_model_len=2048,
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            enable_prefix_caching=prefix_caching,
            max_num_batched_tokens=step_tokens,
            max_num_seqs=max_requests,
            tensor_parallel_size=ranks,
            async_scheduling=False,
            kv_transfer_config=transfer_config(socket, **extra),
        ).create_engine_config()
        self.config.cache_config.num_gpu_blocks = block_count
        # vLLM's CPU platform turns it off.
        self.config.scheduler_config.async_scheduling = runs_ahead
        self._steps_ahead = int(runs_ahead)
        kv_cache_config = _kv_cache_config(block_count, ranks)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = (AsyncScheduler if runs_ahead else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        connector = self.scheduler.connector
        assert isinstance(connector, PrefixdConnector)
        self.connector = connector
        self._worker = worker
        self.workers = self._workers(socket, ranks, block_count, Settings(socket=str(socket), **extra))
        self._aggregator = KVOutputAggregator(ranks)
        self.replies: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self._count = 0
        self._tokens: dict[str, list[int]] = {}
        self._under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def _workers(self, socket: Path, ranks: int, block_count: int, settings: Settings) -> list[Worker]:
        plan = ShardPlan.of(self.config)
        workers, hellos = [], {}
        for rank in range(ranks):
            worker = self._worker(rank, ranks, block_count)
            options = settings.client_options(worker.device_uuid)
            worker.side = WorkerSide(
                Client(socket, self.config.kv_transfer_config.engine_id, options=options),
                settings,
                list(LAYERS),
                plan.shard_of(0, rank),
                writes=plan.writes(rank),
                copies=worker.open_copies,
            )
            facts = worker.side.register(worker.kv, {}, "test", block_count)
            hellos[0, rank] = WorkerHello(facts, worker.device_uuid)
            workers.append(worker)
        self.connector.set_xfer_handshake_metadata_pp_aware(hellos)
        return workers

    # -- an engine's life ---------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> str:
        """Queues a prompt; its request id."""
        self._count += 1
        request_id = f"r{self._count}"
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, None)
        self.scheduler.add_request(
            Request(request_id, list(prompt), sampling, None, block_hasher=self._hasher, **fields)
        )
        self.replies[request_id] = []
        return request_id

    def abort(self, request_id: str) -> None:
        """The caller has gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """One step of the engine; whether anything was computed."""
        computed = False
        if self.scheduler.has_requests() or not self._under_way:
            self._under_way.append(self._computed())
            computed = bool(self._under_way[-1][0].total_num_scheduled_tokens)
        if not computed or len(self._under_way) > self._steps_ahead:
            self._take_in(*self._under_way.popleft())
        return computed

    def _computed(self) -> tuple[Any, ModelRunnerOutput]:
        """What is to be done next, and what came of it."""
        output = self.scheduler.schedule()
        self._learn(output)
        jobs = output.kv_connector_metadata
        assert isinstance(jobs, StepJobs)
        kv_outputs = [self._run_worker(worker, output, jobs) for worker in self.workers]
        sampled = self._sample(output)
        runner_outputs = [
            ModelRunnerOutput(
                req_ids=list(output.num_scheduled_tokens),
                req_id_to_index={name: index for index, name in enumerate(output.num_scheduled_tokens)},
                sampled_token_ids=sampled,
                kv_connector_output=kv_output,
            )
            for kv_output in kv_outputs
        ]
        merged = self._aggregator.aggregate(runner_outputs) if len(runner_outputs) > 1 else runner_outputs[0]
        return output, merged

    def _take_in(self, output: Any, merged: ModelRunnerOutput) -> None:
        """A step is over."""
        for outputs in self.scheduler.update_from_output(output, merged).values():
            for entry in outputs.outputs:
                self.replies[entry.request_id].extend(entry.new_token_ids)
                if entry.prefill_stats is not None:
                    self.cached[entry.request_id] = entry.prefill_stats.num_external_cached_tokens
                if entry.finish_reason is not None:
                    self.finish_reasons[entry.request_id] = str(entry.finish_reason)

    def run(self, steps_max: int = 10_000, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until nothing is left to do, saves of finished requests included."""
        for _ in range(steps_max):
            if until() or not (self.scheduler.has_requests() or self._under_way):
                return
            if not self.step():
                time.sleep(0.001)  # as vLLM's core does, so that threads get on
        raise AssertionError(f"still busy after {steps_max} steps: {list(self.scheduler.requests)}")

    def ask(self, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> list[int]:
        """One prompt from start to end."""
        request_id = self.add(prompt, max_tokens, **fields)
        self.run()
        return self.replies[request_id]

    def close(self) -> None:
        """Ends both sides."""
        for worker in self.workers:
            worker.side.close()
        self.connector.shutdown()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the model runner's part --------------------------------------------------------------------

    def _run_worker(self, worker: Worker, output: Any, jobs: StepJobs) -> KVConnectorOutput:
        side = worker.side
        side.fence(jobs)
        sent: set[str] = set()
        received: set[str] = set()
        bad: set[int] = set()
        if output.has_sync_kv_loads:
            side.start_loads(jobs)
            sent, received = side.finished()
            bad = side.take_bad_blocks()
            self._forward(worker, output, bad)
        else:
            self._forward(worker, output, bad)
            side.start_loads(jobs)
        side.start_saves(jobs)
        side.give_way(jobs)
        sent_since, received_since = side.finished()
        return KVConnectorOutput(
            finished_sending=(sent | sent_since) or None,
            finished_recving=(received | received_since) or None,
            invalid_block_ids=bad | side.take_bad_blocks(),
            kv_connector_worker_meta=side.take_outcomes(),
        )

    def _forward(self, worker: Worker, output: Any, bad: set[int]) -> None:
        for request_id, count, computed in _scheduled(output):
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            if not bad.isdisjoint(table):
                continue  # vLLM throws this step's result away and computes it again
            numbers = numbers_of(self._tokens[request_id][: computed + count])
            assert worker.holds(table, numbers[:computed]), f"{request_id} reads KV that is not its own"
            for position in range(computed, computed + count):
                worker.write(table[position // BLOCK_TOKENS], position % BLOCK_TOKENS, int(numbers[position]))

    def _learn(self, output: Any) -> None:
        """The model runner's own tokens, which run ahead of the scheduler's by what is under way."""
        for request_id, _, computed in _scheduled(output):
            request = self.scheduler.requests[request_id]
            if computed < request.num_tokens or request_id not in self._tokens:
                self._tokens[request_id] = list(request.all_token_ids)

    def _sample(self, output: Any) -> list[list[int]]:
        sampled = []
        for request_id, count, computed in _scheduled(output):
            tokens = self._tokens[request_id]
            if computed + count < len(tokens):
                sampled.append([])
            else:
                tokens.append((int(numbers_of(tokens)[-1]) >> 33) % VOCABULARY)
                sampled.append(tokens[-1:])
        return sampled


def _scheduled(output: Any) -> list[tuple[str, int, int]]:
    """(request, tokens of this step, tokens computed before it), in the order of num_scheduled_tokens."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(name, count, computed[name]) for name, count in output.num_scheduled_tokens.items()]


def _kv_cache_config(block_count: int, ranks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS // ranks, head_size=HEAD_DIM, dtype=torch.float32
    )
    size = spec.page_size_bytes * block_count
    return KVCacheConfig(
        num_blocks=block_count,
        kv_cache_tensors=[
            KVCacheTensor(
                size=size * len(LAYERS),
                layers=list(LAYERS),
                layer_stride=size,
                block_stride=spec.page_size_bytes,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
    )
