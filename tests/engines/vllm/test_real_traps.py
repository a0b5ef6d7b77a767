"""Where connectors for vLLM have been seen to go wrong, asked of an engine that loads between or in steps.

One engine with its own prefix cache on; emptying that one leaves ours. A reply with a salt of its own owes
nothing to any cache and is what others must equal, to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from tests.support.daemon_command import DaemonCommand
from tests.support.scribble import scribble
from tests.support.vllm_models import TINY, make_model, prompt
from tests.support.vllm_process import PATIENT, EnginePool, EngineProcess, engine_options, transfer_config

BLOCK = 128
EVENT_TIMEOUT_MS = 20_000
Reply = dict[str, Any]


@dataclass
class Reader:
    """The engine, its daemon, and who listens to its KV events."""

    process: EngineProcess
    daemon: DaemonCommand
    events: zmq.Socket[bytes]
    has_own_cache: bool
    _salts: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, tokens: list[int]) -> Reply:
        """One reply, which is right; its saves are over."""
        salted = self.process.generate(tokens, salts=[f"salt{next(self._salts)}"])[0]
        reply: Reply = self.process.generate(tokens)[0]
        self.process.ask("settle")
        assert (reply["tokens"], reply["logprobs"]) == (salted["tokens"], salted["logprobs"])
        return reply

    def keep(self, tokens: list[int]) -> None:
        """The prompt is in our cache, and not in the engine's."""
        self.ask(tokens)
        self.process.ask("forget")

    def count(self, name: str) -> int:
        """A counter of the connector."""
        return int(self.process.ask("metrics")["metrics"].get(f"vllm:prefixd_{name}", 0))

    def hear(self, kind: type, hashes: set[bytes]) -> Any:
        """The event of this kind that names one of these blocks; waits until it is published."""
        while self.events.poll(EVENT_TIMEOUT_MS):
            *_, payload = self.events.recv_multipart()
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                if isinstance(event, kind) and event.medium == "CPU" and hashes & set(event.block_hashes):
                    return event
        raise AssertionError(f"no {kind.__name__} was published")


@pytest.fixture(scope="module", params=[True, False], ids=["between steps", "in steps"])
def reader(
    request: pytest.FixtureRequest,
    engines: EnginePool,
    models: Path,
    shared_daemon: DaemonCommand,
) -> Iterator[Reader]:
    """An engine that publishes its KV events, with whole hashes.

    It loads in steps where it has no prefix cache of its own.
    """
    endpoint = f"ipc://{shared_daemon.socket.parent}/events{request.param}"
    options = engine_options(
        make_model(models / "tiny-float32", TINY, "float32"),
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=request.param,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint},
    )
    extra = PATIENT | {"async_load": request.param, "weights_revision": f"traps {request.param}"}
    options["kv_transfer_config"] = transfer_config(shared_daemon.socket, **extra)
    with zmq.Context() as context, context.socket(zmq.SUB) as events, engines.engine(options) as process:
        events.subscribe(b"")
        events.connect(endpoint)
        yield Reader(process, shared_daemon, events, has_own_cache=request.param)


def test_what_is_loaded_lies_behind_the_engines_own_hit(reader) -> None:
    """request.num_computed_tokens is not yet set when blocks are allocated: wrong blocks would load."""
    tokens = prompt(1000, 1000)
    reader.keep(tokens)
    assert reader.ask(tokens[:400])["cached_tokens"] == 3 * BLOCK
    loaded = reader.count("loaded_blocks")
    assert reader.ask(tokens)["cached_tokens"] == 7 * BLOCK
    assert reader.count("loaded_blocks") - loaded == (4 if reader.has_own_cache else 7)


def test_a_load_that_failed_is_not_claimed_again_and_is_counted_as_failed(reader) -> None:
    """After a failed load vLLM asks again, and its own metrics go on counting the tokens as cached."""
    tokens = prompt(1000, 1001)
    reader.keep(tokens)
    spec, hashes = reader.process.identity(tokens)
    scribble(reader.daemon.socket, spec, hashes, [2])
    before = [reader.count(name) for name in ("loaded_blocks", "unloaded_blocks", "questions")]
    reader.ask(tokens)
    after = [reader.count(name) for name in ("loaded_blocks", "unloaded_blocks", "questions")]
    # Two questions: one for the reply with a salt.
    assert [late - early for late, early in zip(after, before, strict=True)] == [2, 5, 2]
    assert set(reader.hear(BlockRemoved, {hashes[2]}).block_hashes) == set(hashes[2:7])
    reader.process.ask("forget")
    assert reader.ask(tokens)["cached_tokens"] == 7 * BLOCK


def test_a_hit_leaves_the_last_token_to_compute(reader) -> None:
    """Its logits are needed: a hit over the whole prompt would have nothing to compute."""
    tokens = prompt(5 * BLOCK, 1002)
    reader.keep(tokens)
    assert reader.ask(tokens)["cached_tokens"] == 4 * BLOCK


def test_what_was_saved_is_published(reader) -> None:
    tokens = prompt(300, 1003)
    reader.keep(tokens)
    _, hashes = reader.process.identity(tokens)
    stored = reader.hear(BlockStored, {hashes[0]})
    assert stored.parent_block_hash is None
    assert stored.token_ids[:BLOCK] == tokens[:BLOCK]
    assert stored.block_size == BLOCK


def test_an_engine_that_slept_answers_right_and_hits_again(reader) -> None:
    tokens = prompt(500, 1004)
    reader.keep(tokens)
    reader.process.ask("nap")
    assert [reader.ask(tokens)["cached_tokens"] for _ in range(2)] == [0, 3 * BLOCK]
    assert reader.daemon.leases() == []
    assert reader.daemon.problems() == []
