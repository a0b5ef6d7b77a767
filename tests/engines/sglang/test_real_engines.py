"""SGLang engines, each with processes of its own, share blocks through the daemon.

Run with stand-ins for the device copies (standins/): SGLang's scheduler, radix tree, host pool, controller
and storage threads are real; the copies between "device" and host pool are torch on the CPU. Each test
compares with the reply of a cold engine to the same prompt.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefixd.v1 import types_pb2

from tests.support.at_work import wait_until_at_work
from tests.support.daemon_command import DaemonCommand
from tests.support.memory_scribble import scribble_all_memory

pytest.importorskip("torch")

from tests.support.sglang_process import BLOCK, EngineProcess, engine_options
from tests.support.vllm_models import TINY, make_model, prompt

WAIT_S = 30.0


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """For models, logs and the socket."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def node(place: Path) -> Iterator[DaemonCommand]:
    """The daemon of this module."""
    with DaemonCommand(place, dram="256MiB") as running:
        yield running


@pytest.fixture(scope="module")
def weights(place: Path) -> Path:
    """The model's directory."""
    return make_model(place / "model", TINY, "float32")


@pytest.fixture(scope="module")
def pair(place: Path, weights: Path, node: DaemonCommand) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two engines of one configuration."""
    options = engine_options(weights, node.socket, "page_first_direct")
    starting = [EngineProcess(name, options, place) for name in ("first", "second")]
    with starting[0] as first, starting[1] as second:
        yield first, second


@pytest.fixture
def first(pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    """One of them."""
    return pair[0]


@pytest.fixture
def second(pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    """The other."""
    return pair[1]


def kept(node: DaemonCommand) -> int:
    """Blocks in the daemon's memory."""
    return int(node.tier(types_pb2.TIER_DRAM).resident_slot_count)


def wait_until_kept(node: DaemonCommand, blocks: int) -> None:
    """Returns when an engine's background thread has saved so many."""
    deadline = time.monotonic() + WAIT_S
    while kept(node) < blocks:
        assert time.monotonic() < deadline, f"{kept(node)} of {blocks} blocks"
        time.sleep(0.05)  # polls another process: there is nothing to wait on


def saved(engine: EngineProcess, node: DaemonCommand, tokens: list[int]) -> dict[str, Any]:
    """A cold engine's reply to a prompt that nobody has seen, once its whole blocks are kept."""
    before = kept(node)
    (reply,) = engine.generate(tokens)
    assert reply["cached"] == 0
    wait_until_kept(node, before + len(tokens) // BLOCK)
    return reply


def test_what_one_engine_has_computed_another_loads(first, second, node) -> None:
    tokens = prompt(2000, seed=1)
    cold = saved(first, node, tokens)
    (warm,) = second.generate(tokens)
    assert warm == {"tokens": cold["tokens"], "cached": 31 * BLOCK}
    assert node.problems() == []


def test_the_next_turn_loads_the_last_one_and_adds_to_it(first, second, node) -> None:
    conversation = prompt(1100, seed=2)
    saved(first, node, conversation[:700])
    before = kept(node)
    (cold,) = first.generate(conversation)
    assert cold["cached"] == 10 * BLOCK
    wait_until_kept(node, before + 7)
    (warm,) = second.generate(conversation)
    assert warm == {"tokens": cold["tokens"], "cached": 17 * BLOCK}


def test_damaged_blocks_are_computed_again(first, second, node) -> None:
    tokens = prompt(900, seed=3)
    cold = saved(first, node, tokens)
    assert node.process is not None
    assert scribble_all_memory(node.process.pid) > 0
    (reply,) = second.generate(tokens)
    assert reply == {"tokens": cold["tokens"], "cached": 0}
    assert node.problems() == []


def test_engines_outlive_the_daemon_and_find_it_again(first, second, node) -> None:
    tokens, later = prompt(900, seed=4), prompt(700, seed=5)
    cold = saved(first, node, tokens)
    node.kill()
    (reply,) = second.generate(tokens)
    assert reply == {"tokens": cold["tokens"], "cached": 0}
    node.start()
    node.wait_until_attached(2)
    for engine in (first, second):
        wait_until_at_work(lambda tokens, engine=engine: int(engine.generate(tokens)[0]["cached"]))
    cold = saved(first, node, later)
    (warm,) = second.generate(later)
    assert warm == {"tokens": cold["tokens"], "cached": 10 * BLOCK}


def test_another_layout_shares_nothing_and_new_weights_share_nothing(first, place, weights, node) -> None:
    tokens = prompt(700, seed=6)
    cold = saved(first, node, tokens)
    other = make_model(place / "other", TINY, "float32", seed=1)
    with EngineProcess("third", engine_options(weights, node.socket, "layer_first"), place) as engine:
        assert saved(engine, node, tokens) == cold
        engine.forget()
        assert engine.generate(tokens) == [{"tokens": cold["tokens"], "cached": 10 * BLOCK}]
        engine.forget()
        assert engine.ask("update_weights", model=str(other))["updated"]
        before = kept(node)
        (changed,) = engine.generate(tokens)
        assert changed["cached"] == 0
        assert changed["tokens"] != cold["tokens"]
        engine.forget()
        assert engine.generate(tokens) == [changed]
        assert kept(node) == before
        assert "the weights were updated in place" in engine.log
