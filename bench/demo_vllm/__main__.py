"""make demo-vllm: a daemon, vLLM processes, prompts with a long common prefix, and what a hit saves.

Three engines, each a process of its own, cutting prompts into steps as vLLM does by itself: one without the
connector gives the cold times and the right replies, engine A fills the cache with one prompt, engine B
answers all of them. Exit status: 0 when tokens were equal, logprobs agreed to 1e-4 and every shared prefix
hit; else 1.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.daemon_command import DaemonCommand
from tests.support.vllm_models import MID, make_model, prompt
from tests.support.vllm_process import EngineProcess, engine_options, transfer_config

BUILD = Path(__file__).resolve().parents[2] / "build" / "demo-vllm"
SHARED_TOKENS = 4000
OWN_TOKENS = (97, 120, 64)
REPLY_TOKENS = 8
DIFFERENCE_MAX = 1e-4
"""Of logprobs, in float32: an engine's own results depend that much on how it cuts a prompt into steps."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt. Times are seconds to the first token."""

    tokens: int
    hit_tokens: int
    cold_s: float
    warm_s: float
    same_tokens: bool
    difference: float

    @property
    def failure(self) -> str:
        """Why this row fails the demo; empty when it does not."""
        if not self.same_tokens or self.difference > DIFFERENCE_MAX:
            return "the reply differs from the run without cache"
        if self.hit_tokens < SHARED_TOKENS - 128:
            return "the shared prefix was not found in the cache"
        return ""


def main() -> int:
    """Runs the demo; returns the exit status."""
    console = Console()
    BUILD.mkdir(parents=True, exist_ok=True)
    prompts = [
        [*prompt(SHARED_TOKENS, 1), *prompt(count, 2 + index)] for index, count in enumerate(OWN_TOKENS)
    ]
    # A unix socket's path is limited to 107 bytes, so it does not lie in the build folder.
    with (
        tempfile.TemporaryDirectory(prefix="prefixd-demo-") as directory,
        console.status("making a random-weight Llama of 150 M parameters") as status,
        DaemonCommand(Path(directory), dram="1GiB") as daemon,
    ):
        model = make_model(BUILD / "model", MID, "float32")
        status.update("vLLM without the cache")
        with _engine("cold", model, None) as cold:
            _warm_up(cold)
            expected = [_ask(cold, tokens) for tokens in prompts]
        status.update("vLLM, engine A: computes one prompt, the cache keeps it")
        with _engine("A", model, daemon) as first:
            _warm_up(first)
            _ask(first, prompts[0])
            first.ask("settle")
        status.update("vLLM, engine B: another process")
        with _engine("B", model, daemon) as second:
            _warm_up(second)
            loaded = [_ask(second, tokens) for tokens in prompts]
    rows = [_row(*each) for each in zip(prompts, expected, loaded, strict=True)]
    console.print(_table(rows))
    for row in rows:
        if row.failure:
            console.print(f"[red]FAILED[/red] {row.tokens} tokens: {row.failure}")
    return int(any(row.failure for row in rows))


def _engine(name: str, model: Path, daemon: DaemonCommand | None) -> EngineProcess:
    options = engine_options(
        model,
        dtype="float32",
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=512 << 20,
        skip_tokenizer_init=True,
    )
    if daemon is not None:
        options["kv_transfer_config"] = transfer_config(daemon.socket)
    # Both cores; threads that wait for each other sleep instead of spinning.
    return EngineProcess(name, options, BUILD, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive")


def _warm_up(process: EngineProcess) -> None:
    """The first request of a process makes its kernels ready; less than a block, so nothing is kept."""
    process.generate(prompt(100, 99), max_tokens=2)


def _ask(process: EngineProcess, tokens: list[int]) -> dict[str, Any]:
    return process.generate(tokens, max_tokens=REPLY_TOKENS)[0]


def _row(tokens: list[int], cold: dict[str, Any], warm: dict[str, Any]) -> Row:
    same = cold["tokens"] == warm["tokens"]
    positions = zip(cold["logprobs"], warm["logprobs"], strict=True)
    differences = [
        abs(one[token] - other[token]) for one, other in positions for token in one if token in other
    ]
    return Row(len(tokens), warm["cached_tokens"], cold["first_s"], warm["first_s"], same, max(differences))


def _table(rows: list[Row]) -> Table:
    table = Table(title="Engine B (vLLM), after engine A has answered the first prompt")
    for heading in (
        "tokens",
        "hit tokens",
        "TTFT cold",
        "TTFT warm",
        "speed-up",
        "same tokens",
        "logprobs differ by",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.tokens:,}",
            f"{row.hit_tokens:,}",
            f"{row.cold_s:.2f} s",
            f"{row.warm_s:.3f} s",
            f"{row.cold_s / row.warm_s:.0f} x",
            "[green]yes[/green]" if row.same_tokens else "[red]no[/red]",
            f"{row.difference:.1e}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
