"""Time to the first token of a prompt whose first 4,000 tokens are kept: at least 20 times sooner than cold.

    python -m bench.vllm.ttft

A Llama of 150 M parameters in bfloat16 on vLLM, cutting prompts into steps as it does by itself. Cold prompts
carry a cache salt of their own, so nothing of them is found; warm ones share a prefix that was asked for
once. Medians of interleaved rounds in one process.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from tests.support.daemon_command import DaemonCommand
from tests.support.vllm_models import MID, make_model, prompt
from tests.support.vllm_process import PATIENT, EngineProcess, engine_options, transfer_config

LIMIT = 20.0
ROUNDS = 3
SHARED = prompt(4000, 1)


def main() -> int:
    """Prints the medians; 1 below the limit."""
    with (
        tempfile.TemporaryDirectory(prefix="pfx") as directory,
        DaemonCommand(Path(directory), dram="1GiB") as daemon,
    ):
        model = make_model(Path(directory) / "model", MID, "bfloat16")
        options = engine_options(
            model,
            dtype="bfloat16",
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=512 << 20,
            skip_tokenizer_init=True,
        )
        options["kv_transfer_config"] = transfer_config(daemon.socket, **PATIENT)
        environment = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
        with EngineProcess("ttft", options, Path(directory), **environment) as engine:
            engine.generate(SHARED, max_tokens=1)
            engine.ask("settle")
            rounds = [(_cold(engine, index), _warm(engine, index)) for index in range(ROUNDS)]
    cold, warm = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(cold_s / warm_s for cold_s, warm_s in rounds)
    print(
        f"TTFT cold {cold:.2f} s, warm {warm * 1000:.0f} ms: {ratio:.0f} times sooner, at least {LIMIT:.0f}"
    )
    return int(ratio < LIMIT)


def _cold(engine: EngineProcess, index: int) -> float:
    reply = engine.generate(_prompt(index), max_tokens=1, salts=[f"cold{index}"])[0]
    assert reply["cached_tokens"] == 0
    engine.ask("settle")
    return float(reply["first_s"])


def _warm(engine: EngineProcess, index: int) -> float:
    reply = engine.generate(_prompt(index), max_tokens=1)[0]
    assert reply["cached_tokens"] >= len(SHARED) - 128
    engine.ask("settle")
    return float(reply["first_s"])


def _prompt(index: int) -> list[int]:
    """The shared prefix and 40 tokens of its own."""
    return [*SHARED, *prompt(40, 2 + index)]


if __name__ == "__main__":
    sys.exit(main())
