"""A transformers engine generates while one daemon takes over from another: no reply differs in a bit."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import torch
from prefixd.v1 import types_pb2
from prefixd_client import Client, ClientOptions
from prefixd_client.connectors.transformers import PrefixCachedModel
from prefixd_client.connectors.transformers.model import Generation
from prefixd_client.prefix_hash import chain_hashes
from prefixd_client.values import Tier

from tests.support.daemon_command import DaemonCommand
from tests.support.engine_process import PATIENT
from tests.support.models import BLOCK_TOKENS, prompt, tiny_llama
from tests.support.nvme_daemon import wait_for
from tests.support.wire import short_directory

NEW_TOKENS = 2
PROMPT_BLOCKS, PROMPT_COUNT = 8, 90
"""720 blocks, and memory for 512."""
ON_DISK_COUNT = 128
"""More than the replies under the new daemon bring back before it is looked at: they are the next in turn."""
SETTINGS = ("dram.segment=2MiB", "nvme.size=64MiB", "nvme.segment=2MiB", "nvme.latency_max_s=60")
REPLIES_AFTER, REFERENCE_EVERY = 5, 9


def daemon(directory: Path, *flags: str) -> DaemonCommand:
    """One over the same data directory as the other."""
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    return DaemonCommand(directory, "--data-dir", str(directory / "data"), *words, *flags, dram="4MiB")


class Generating:
    """An engine thread that answers prompts, one after the other, until it is stopped."""

    def __init__(self, engine: PrefixCachedModel, prompts: list[list[int]]) -> None:
        self._engine = engine
        self._prompts = prompts
        self._stopping = threading.Event()
        self.replies: list[tuple[int, Generation]] = []
        self.errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends after the reply under way."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        at = 0
        while not self._stopping.is_set():
            try:
                self.replies.append((at, self._engine.generate(self._prompts[at], NEW_TOKENS)))
            except Exception as error:  # the outermost seam: any error of an engine is what must not be
                self.errors.append(error)
            at = (at + 1) % len(self._prompts)


def test_no_reply_fails_or_differs_and_nvme_goes_on_hitting() -> None:
    model = tiny_llama()
    prompts = [prompt(PROMPT_BLOCKS * BLOCK_TOKENS + 5, seed=number) for number in range(PROMPT_COUNT)]
    options = ClientOptions(**PATIENT)
    with (
        short_directory() as directory,
        daemon(directory) as old,
        contextlib.ExitStack() as ending,
        Client(old.socket, engine_name="transformers", options=options) as client,
    ):
        old.wait_until_attached(1)
        engine = PrefixCachedModel(model, client, block_tokens=BLOCK_TOKENS)
        generating = Generating(engine, prompts)
        wait_for(lambda: old.tier(types_pb2.TIER_NVME).resident_slot_count > ON_DISK_COUNT, "blocks on NVMe")
        assert old.process is not None
        boot = client.status().boot_id
        new = ending.enter_context(daemon(directory, "--takeover"))
        assert old.process.wait(30) == 0
        wait_for(
            lambda: client.status().state == "ready" and client.status().boot_id != boot, "the new daemon"
        )
        before = len(generating.replies)
        wait_for(lambda: len(generating.replies) >= before + REPLIES_AFTER, "replies with the new daemon")
        generating.stop()
        hits = [engine._namespace.lookup(chain_hashes(tokens, BLOCK_TOKENS)).hits for tokens in prompts]
        from_disk = [at for at, found in enumerate(hits) if Tier.NVME in dict(found)]
        late = [(at, engine.generate(prompts[at], NEW_TOKENS)) for at in from_disk[:3]]
        assert new.problems() == []
    assert generating.errors == []
    assert late
    assert all(reply.prefill.stats.hit_token_count > 0 for _, reply in late)
    reference = PrefixCachedModel(model, None, block_tokens=BLOCK_TOKENS)
    expected: dict[int, Generation] = {}
    for at, reply in [*generating.replies, *late]:
        if at not in expected:
            # All replies to a prompt must be one; some are computed without any cache, which takes its time.
            expected[at] = reply if at % REFERENCE_EVERY else reference.generate(prompts[at], NEW_TOKENS)
        assert reply.tokens == expected[at].tokens
        assert torch.equal(reply.logits, expected[at].logits)
