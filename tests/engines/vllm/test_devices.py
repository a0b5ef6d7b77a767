"""Engines on GPUs, as far as they can be looked at without one; tests/gpu has the copies."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from prefixd_client.connectors.vllm import UnsupportedEngine
from prefixd_client.connectors.vllm.metadata import WorkerHello

from tests.support.vllm_harness import LAYERS, VOCABULARY, Harness, right_reply


def greet(engine: Harness, *devices: str) -> None:
    """The workers say hello again, from these GPUs."""
    facts = engine.workers[0].side.register(engine.workers[0].kv, {}, "test", 64)
    hellos = {(0, rank): WorkerHello(facts, device) for rank, device in enumerate(devices)}
    engine.connector.set_xfer_handshake_metadata_pp_aware(hellos)


@pytest.mark.parametrize(
    ("devices", "named"),
    [(["GPU-a"], ("GPU-a",)), (["GPU-a", "GPU-a"], ("GPU-a",)), (["GPU-a", "GPU-b"], ()), ([""], ())],
    ids=["one", "shared", "several", "none"],
)
def test_leases_may_lie_on_the_gpu_of_all_workers(daemon, engine_of, devices, named) -> None:
    prompt = [int(token) for token in np.random.default_rng(3).integers(3, VOCABULARY, 200)]
    with engine_of(daemon) as engine:
        greet(engine, *devices)
        assert engine.connector._client.control.options.redeemer_devices == named
        assert engine.ask(prompt) == engine.ask(prompt) == right_reply(prompt, 4)
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
