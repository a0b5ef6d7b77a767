"""Engines on GPUs, as far as they can be looked at without one; tests/gpu has the copies."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from prefixd_client.connectors.vllm import UnsupportedEngine
from prefixd_client.connectors.vllm.metadata import WorkerHello
from prefixd_client.connectors.vllm.shards import ShardPlan

from tests.support.vllm_harness import LAYERS, VOCABULARY, Harness, right_reply


def greet(engine: Harness, *devices: str) -> None:
    """The workers say hello again, from these GPUs."""
    facts = engine.workers[0].side.register(engine.workers[0].kv, {}, "test", 64)
    hellos = {(0, rank): WorkerHello(facts, device) for rank, device in enumerate(devices)}
    engine.connector.set_xfer_handshake_metadata_pp_aware(hellos)


@pytest.mark.parametrize(
    ("devices", "shards", "named"),
    [
        (["GPU-a"], 1, ("GPU-a",)),
        (["GPU-a", "GPU-a"], 1, ("GPU-a",)),
        (["GPU-a", "GPU-b"], 2, ("GPU-a", "GPU-b")),
        (["GPU-a", "GPU-b"], 1, ()),
        ([""], 1, ()),
    ],
    ids=["one", "one for all", "each its own", "several for a shard", "none"],
)
def test_leases_may_lie_on_the_gpus_of_those_who_redeem_them(
    daemon, engine_of, devices, shards, named
) -> None:
    prompt = [int(token) for token in np.random.default_rng(3).integers(3, VOCABULARY, 200)]
    with engine_of(daemon) as engine:
        engine.connector._plan = ShardPlan(1, len(devices), shards)
        greet(engine, *devices)
        assert engine.connector._client.control.options.redeemer_devices == named
        assert engine.ask(prompt) == engine.ask(prompt) == right_reply(prompt, 4)
        if shards == 1:  # the harness has one worker, which no second shard comes from
            assert engine.cached == {"r1": 0, "r2": 192}


def test_a_worker_whose_gpu_cannot_be_copied_from_is_refused_at_start(daemon, engine_of) -> None:
    with engine_of(daemon) as engine:
        (worker,) = engine.workers
        layer = worker.kv[LAYERS[0]]
        on_gpu = SimpleNamespace(
            device=SimpleNamespace(type="cuda"),
            shape=layer.shape,
            dtype=layer.dtype,
            **{name: getattr(layer, name) for name in ("data_ptr", "stride", "dim", "element_size")},
        )
        with pytest.raises(UnsupportedEngine, match="install cuda-bindings beside vLLM"):
            worker.side.register({LAYERS[0]: on_gpu}, {}, "", 64)
