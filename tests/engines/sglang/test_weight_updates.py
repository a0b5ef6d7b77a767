"""Every way in which SGLang writes weights in place is noticed, also one that fails half way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prefixd_client.connectors.sglang import UnsupportedEngine, weight_updates  # noqa: E402 - needs SGLang
from safetensors.torch import save_file  # noqa: E402 - needs SGLang's environment

NEW = 7.0
"""What updates write, over zeros."""

CALLS = (
    "begin_weight_update",
    "end_weight_update",
    *(f"update_weights_from_{way}" for way in ("disk", "distributed", "tensor", "ipc")),
)


class Model(torch.nn.Module):
    """One parameter; a name that it does not have fails the load behind those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.fails_once = False

    def load_weights(self, weights: Any) -> None:
        if self.fails_once:
            self.fails_once = False
            raise RuntimeError("out of memory")
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)


@pytest.fixture
def process_group() -> Iterator[Any]:
    """torch's group of one rank, which SGLang's updater waits for."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def served() -> Model:
    """What the engine computes with."""
    return Model()


@pytest.fixture
def updates(engine_configuration: None, process_group: Any, served: Model) -> Any:
    """SGLang's own updates of that model, as a scheduler takes them, from before anybody watches."""
    from sglang.srt.configs.model_config import ModelConfig  # noqa: PLC0415 - needs SGLang
    from sglang.srt.managers.scheduler_components.weight_updater import (  # noqa: PLC0415 - needs SGLang
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.model_executor.model_runner_components import (  # noqa: PLC0415 - needs SGLang
        weight_updater,
    )
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - needs SGLang

    class Manager(SchedulerWeightUpdaterManager):
        def __post_init__(self) -> None:
            self.tp_cpu_group = process_group

    runner = SimpleNamespace(
        weight_updater=weight_updater.WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=ModelConfig.from_server_args(get_server_args()),
            custom_weight_loaders={},
            get_model=lambda: served,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: runner,
            _model_update_group={"trainer": process_group},
        )
    )
    manager = Manager(
        tp_worker=SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)],
            model_runner=runner,
            deserialize_own_rank=lambda tensors: tensors,
        ),
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
        scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
    )
    kept = {name: getattr(manager, name) for name in CALLS}
    weight_updates.watch()
    return SimpleNamespace(**kept)


def asked(**fields: Any) -> Any:
    """What a trainer asks for."""
    usual = {"selector": "all", "load_format": None, "weight_version": None, "flush_cache": False}
    return SimpleNamespace(**(usual | {"torch_empty_cache": False} | fields))


def noticed(act: Callable[[], Any]) -> Any:
    """The answer of an update, which was counted."""
    before = weight_updates.update_count()
    answer = act()
    assert weight_updates.update_count() > before
    return answer


def test_weights_that_a_trainer_writes_by_rdma_are_noticed(updates: Any, served: Model) -> None:
    """Nothing is called between the two: each of them counts, for storages attached before and between."""
    assert noticed(lambda: updates.begin_weight_update(asked())).success
    served.weight.fill_(NEW)
    assert noticed(lambda: updates.end_weight_update(asked())).success


def test_tensors_that_are_handed_over_are_noticed(updates: Any, served: Model) -> None:
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - needs SGLang

    updates.begin_weight_update(asked())
    tensors = [("weight", torch.full((2,), NEW))]
    update = asked(serialized_named_tensors=tensors, load_format="direct")
    with get_parallel().override(tp_rank=0):
        assert noticed(lambda: updates.update_weights_from_tensor(update)).success
    assert served.weight[0] == NEW


def test_a_broadcast_that_fails_half_way_is_noticed(updates: Any, served: Model) -> None:
    updates.begin_weight_update(asked())
    served.weight.fill_(NEW)
    update = asked(
        names=["weight", "absent"], dtypes=["float32"] * 2, shapes=[(2,)] * 2, group_name="trainer"
    )
    answer = noticed(lambda: updates.update_weights_from_distributed(update))
    assert not answer.success
    assert "partially updated" in answer.message


def test_files_that_stay_loaded_after_a_failed_update_are_noticed(
    updates: Any, served: Model, tmp_path: Path
) -> None:
    """SGLang rolls back by the new path."""
    save_file({"weight": torch.full((2,), NEW)}, tmp_path / "model.safetensors")
    served.fails_once = True
    update = asked(model_path=str(tmp_path), load_format="auto", recapture_cuda_graph=False)
    assert not noticed(lambda: updates.update_weights_from_disk(update)).success
    assert served.weight[0] == NEW


def test_a_checkpoint_engine_is_noticed(updates: Any) -> None:
    noticed(lambda: updates.update_weights_from_ipc(asked(zmq_handles={})))


def test_an_updater_that_lacks_a_step_is_refused() -> None:
    class Updater:
        def update_weights_from_disk(self) -> None: ...

    with pytest.raises(UnsupportedEngine, match="load_weights_from_distributed"):
        weight_updates.watch_class(Updater)
