"""Which ranks of an engine hold the same bytes, and who of them writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Shards of an engine with tensor and pipeline parallelism.

    Tensor ranks with identical bytes (MLA, or more ranks than KV heads) share one shard; each pipeline stage
    holds other layers. shard_count = pipeline_size * shards_per_stage.
    """

    pipeline_size: int
    tensor_size: int
    shards_per_stage: int

    @classmethod
    def of(cls, vllm_config: Any) -> ShardPlan:
        """Reads the plan from vLLM's configuration."""
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        tensor_size = int(parallel.tensor_parallel_size)
        kv_heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
        return cls(int(parallel.pipeline_parallel_size), tensor_size, min(tensor_size, max(1, kv_heads)))

    @property
    def shard_count(self) -> int:
        """Shards with bytes of their own."""
        return self.pipeline_size * self.shards_per_stage

    @property
    def world_size(self) -> int:
        """Workers of the engine."""
        return self.pipeline_size * self.tensor_size

    def shard_of(self, pipeline_rank: int, tensor_rank: int) -> int:
        """The shard that a worker reads, and writes if it is the writer."""
        return pipeline_rank * self.shards_per_stage + tensor_rank // self._ranks_per_shard

    def writes(self, tensor_rank: int) -> bool:
        """Whether this tensor rank writes its shard: the first of those that share it."""
        return tensor_rank % self._ranks_per_shard == 0

    @property
    def _ranks_per_shard(self) -> int:
        return self.tensor_size // self.shards_per_stage
