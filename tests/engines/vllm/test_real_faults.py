"""One vLLM engine lives through every fault of its cache: replies stay right, delays stay bounded.

The engine is one process for the whole module; daemons come and go on its socket. What is right was computed
by the same engine before there was any daemon, a block a step, so replies must be equal to the last bit.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefixd.v1 import types_pb2

from tests.support.at_work import wait_until_at_work
from tests.support.daemon_command import ROOT, DaemonCommand
from tests.support.scribble import scribble
from tests.support.vllm_models import TINY, make_model, prompt
from tests.support.vllm_process import EnginePool, EngineProcess, engine_options, transfer_config

PROMPTS = [prompt(2000 + 128 * seed, 700 + seed) for seed in range(6)]
"""15 to 20 blocks of 512 KiB each."""
PATIENCE = {"lookup_timeout_s": 1.0, "save_patience_s": 0.5, "load_if_sooner": False}
DELAY_MAX_S = 8.0
"""Most that a fault may cost a request beyond computing it: deadlines and waits, on a busy machine."""
NVME = ("--set", "nvme.size=512MiB", "--set", "nvme.segment=16MiB", "--set", "dram.segment=4MiB")
Reply = dict[str, Any]


@dataclass
class Life:
    """The engine, what it answers without a cache, and where its daemons listen."""

    process: EngineProcess
    directory: Path
    right: list[Reply]

    def daemon(self, *arguments: str, **fields: Any) -> DaemonCommand:
        """A daemon for the engine; start it by `with`."""
        return DaemonCommand(self.directory, *arguments, **fields)

    def ask(self, index: int, **fields: Any) -> Reply:
        """One prompt: its reply is right, and came in bounded time."""
        begin = time.monotonic()
        reply: Reply = self.process.generate(PROMPTS[index], **fields)[0]
        passed, usual = time.monotonic() - begin, self.right[index]["total_s"]
        assert (reply["tokens"], reply["logprobs"]) == (
            self.right[index]["tokens"],
            self.right[index]["logprobs"],
        )
        assert passed < 3 * usual + DELAY_MAX_S
        return reply

    def rejoin(self, daemon: DaemonCommand) -> None:
        """Returns when the engine works with this daemon."""
        daemon.wait_until_attached(2)
        wait_until_at_work(lambda tokens: int(self.process.generate(tokens)[0]["cached_tokens"]))

    def fill(self, daemon: DaemonCommand, *indexes: int) -> None:
        """Asks these prompts once the engine works with this daemon, and waits for their saves."""
        self.rejoin(daemon)
        for index in indexes:
            self.ask(index)
        self.process.ask("settle")


@pytest.fixture(scope="module")
def life(engines: EnginePool, models: Path) -> Iterator[Life]:
    """An engine that was started without a daemon."""
    model = make_model(models / "tiny-float32", TINY, "float32")
    with tempfile.TemporaryDirectory(prefix="pfx") as short:
        options = engine_options(model, dtype="float32", skip_tokenizer_init=True)
        options["kv_transfer_config"] = transfer_config(Path(short) / "p.sock", **PATIENCE)
        with engines.engine(options) as process:
            right = [process.generate(tokens)[0] for tokens in PROMPTS]
            yield Life(process, Path(short), right)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2])
def test_a_daemon_killed_while_a_request_looks_up_loads_or_saves_costs_no_reply(life, after_s) -> None:
    with life.daemon(dram="128MiB") as daemon:
        life.fill(daemon, 0)
        assert life.ask(0)["cached_tokens"] == 1920
        killer = threading.Timer(after_s, daemon.kill)
        killer.start()
        during = [life.ask(index) for index in (0, 1)]
        killer.join()
        assert [reply["finish_reason"] for reply in during] == ["length"] * 2
        assert life.ask(0)["cached_tokens"] == 0


def test_a_damaged_block_in_memory_is_computed(life) -> None:
    with life.daemon(dram="128MiB") as daemon:
        life.fill(daemon, 0)
        scribble(daemon.socket, *life.process.identity(PROMPTS[0]), blocks=[6])
        life.ask(0)
        life.process.ask("settle")
        assert life.ask(0)["cached_tokens"] == 1920
        assert daemon.stats().bad_block_count == 1
        assert daemon.problems() == []
        assert daemon.leases() == []


def test_damaged_blocks_on_nvme_are_computed(life, tmp_path) -> None:
    arguments = ("--data-dir", str(tmp_path / "data"), *NVME)
    with life.daemon(*arguments, dram="16MiB") as daemon:
        life.fill(daemon, *range(len(PROMPTS)))
        daemon.kill()
        files = list((tmp_path / "data").glob("nvme/segment-*.kv"))
        assert files
        for path in files:
            damage(path)
        daemon.start()
        life.rejoin(daemon)
        stored = daemon.tier(types_pb2.TIER_NVME).resident_slot_count
        assert stored > 20
        for index in range(len(PROMPTS)):
            life.ask(index)
        life.process.ask("settle")
        assert daemon.tier(types_pb2.TIER_NVME).resident_slot_count < stored or daemon.stats().bad_block_count
        assert daemon.problems() == []
        assert daemon.leases() == []


def test_a_full_store_costs_no_reply(life) -> None:
    with life.daemon("--set", "dram.segment=2MiB", dram="6MiB") as daemon:
        life.fill(daemon, *range(len(PROMPTS)), 0)
        assert daemon.problems() == []
        assert daemon.leases() == []


def test_a_slow_disk_delays_no_request_beyond_its_bound(life, tmp_path) -> None:
    arguments = ("--data-dir", str(tmp_path / "data"), *NVME)
    with life.daemon(*arguments, dram="16MiB") as fast:
        life.fill(fast, *range(len(PROMPTS)))
    slow = (str(ROOT / ".venv/bin/python"), "-m", "tests.support.slow_disk", "0.5")
    with life.daemon(*arguments, dram="16MiB", command=slow) as daemon:
        life.fill(daemon, *range(len(PROMPTS)), 0)
        assert daemon.problems() == []
        assert daemon.leases() == []


def damage(path: Path) -> None:
    """Flips a byte in every 64 KiB of a segment file, its header excepted."""
    content = bytearray(path.read_bytes())
    for offset in range(4096 + 17, len(content), 65_536):
        content[offset] ^= 0xFF
    path.write_bytes(content)
