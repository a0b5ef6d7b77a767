"""Engines with KV on GPUs, over the stand-in driver: vLLM's scheduler, the whole connector, no model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from prefixd_client.namespace import ChecksumAlgorithm

from tests.engines.vllm.test_random_lives import STEPS, live
from tests.support import fake_cuda
from tests.support.fake_cuda import MIB, FakeCuda, uuid_of
from tests.support.vllm_gpu_worker import GpuWorker
from tests.support.vllm_harness import VOCABULARY, right_reply


@pytest.fixture(scope="module")
def own_machine(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    """The stand-in that this process uses: a driver is initialised once."""
    if not fake_cuda.has_compiler():
        pytest.skip("the stand-in driver needs gcc to be built")
    machine = FakeCuda(tmp_path_factory.mktemp("cuda"), 1, 64 * MIB)
    machine.preload()
    return machine


@pytest.fixture(autouse=True)
def machine(own_machine: FakeCuda) -> Iterator[FakeCuda]:
    """The stand-in; afterwards no rule was broken."""
    before = len(own_machine.violations)
    yield own_machine
    own_machine.heal()
    own_machine.forget()
    assert own_machine.violations[before:] == []


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, count)]


@pytest.mark.parametrize("way", [{}, {"async_load": False}, {"ranks": 2}], ids=str)
def test_an_engine_hits_what_another_has_saved(daemon, engine_of, way) -> None:
    prompt = tokens(400)
    with (
        engine_of(daemon, worker=GpuWorker, **way) as writer,
        engine_of(daemon, worker=GpuWorker, **way) as reader,
    ):
        assert writer.connector._side.namespace.checksum_algorithm is ChecksumAlgorithm.LANES_64
        assert writer.connector._client.control.options.redeemer_devices == (uuid_of(0),)
        assert writer.ask(prompt) == right_reply(prompt, 4)
        assert reader.ask(prompt) == right_reply(prompt, 4)
        assert (writer.cached, reader.cached) == ({"r1": 0}, {"r1": 384})


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_end_well(daemon, engine_of, seed) -> None:
    live(daemon, engine_of, seed, STEPS, worker=GpuWorker)


def test_a_daemon_that_is_killed_costs_no_reply(own_daemon, engine_of) -> None:
    prompt = tokens(500)
    with engine_of(own_daemon, worker=GpuWorker, lookup_timeout_s=0.1, save_patience_s=0.2) as engine:
        engine.ask(prompt[:300])
        names = [engine.add(prompt, 40), engine.add(tokens(200, seed=1), 40)]
        for _ in range(3):
            engine.step()
        own_daemon.kill()
        engine.run()
        assert engine.replies[names[0]] == right_reply(prompt, 40)
        assert engine.replies[names[1]] == right_reply(tokens(200, seed=1), 40)
