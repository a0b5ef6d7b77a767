"""make demo: a daemon, two engine processes, five prompts, and whether a logit differs from a run without.

Exit status: 0 when every logit was bit-equal and every shared prompt hit; else 1.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .model import make_model
from .processes import Daemon, Engine, ProcessFailed
from .prompts import Prompt, make_prompts

BUILD = Path(__file__).resolve().parents[2] / "build" / "demo"
DRAM_SIZE = "512MiB"
NEW_TOKENS = 8
ENGINE_NAMES = ("A", "B")


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt's outcome. Times are seconds to the first logits, without and with the cache."""

    prompt: Prompt
    hit_tokens: int
    cold_s: float
    warm_s: float
    identical: bool

    @property
    def failure(self) -> str:
        """Why this row fails the demo; empty when it does not."""
        if not self.identical:
            return "logits differ from the run without cache"
        if self.prompt.shares and not self.hit_tokens:
            return "nothing was found in the cache"
        return ""


def main() -> int:
    """Run the demo; returns the exit status."""
    console = Console()
    BUILD.mkdir(parents=True, exist_ok=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            rows = _run(progress)
    except ProcessFailed as failure:
        console.print(str(failure), markup=False, highlight=False)
        return 1
    console.print(_table(rows))
    for row in rows:
        if row.failure:
            console.print(f"[red]FAILED[/red] {row.prompt.name}: {row.failure}")
    if any(row.failure for row in rows):
        return 1
    console.print("Every logit is bit-equal to a run with caching off.")
    return 0


def _run(progress: Progress) -> list[Row]:
    """Start everything, send the prompts, end everything."""
    task = progress.add_task("making a small random-weight Llama", total=4)
    model = BUILD / "model"
    make_model(model)
    prompts = make_prompts(model)
    progress.update(task, advance=1, description="starting the daemon", total=4 + len(prompts))
    with ExitStack() as stack:
        # A unix socket's path is limited to 107 bytes, so it does not lie in the build folder.
        socket = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefixd-demo-"))) / "prefixd.sock"
        )
        daemon = stack.enter_context(Daemon(socket, DRAM_SIZE, BUILD / "daemon.log"))
        daemon.wait_until_serving()
        progress.update(task, advance=1, description="starting two engine processes")
        engines = [
            stack.enter_context(Engine(f"engine {name}", model, socket, BUILD / f"engine-{name}.log"))
            for name in ENGINE_NAMES
        ]
        for engine in engines:
            engine.wait_until_ready()
        progress.advance(task)
        rows = []
        for prompt in prompts:
            progress.update(task, advance=1, description=prompt.name)
            rows.append(_compare(engines[prompt.engine], prompt))
        return rows


def _compare(engine: Engine, prompt: Prompt) -> Row:
    """One prompt in one engine process, with caching off and then on."""
    cold = engine.generate(prompt.tokens, NEW_TOKENS, cached=False)
    warm = engine.generate(prompt.tokens, NEW_TOKENS, cached=True)
    identical = cold["logits_sha256"] == warm["logits_sha256"] and cold["reply"] == warm["reply"]
    return Row(prompt, warm["hit_tokens"], cold["ttft_s"], warm["ttft_s"], identical)


def _table(rows: list[Row]) -> Table:
    """The demo's result."""
    table = Table(title="Two engine processes, one prefix cache", padding=(0, 0, 0, 1))
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "hit\ntokens", "TTFT\ncold", "TTFT\nwarm", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("identical\nlogits")
    for row in rows:
        table.add_row(
            f"{ENGINE_NAMES[row.prompt.engine]}: {row.prompt.name}",
            f"{len(row.prompt.tokens):,}",
            f"{row.hit_tokens:,}",
            f"{row.cold_s:.2f} s",
            f"{row.warm_s:.2f} s",
            f"{row.cold_s / row.warm_s:.1f} x",
            "[green]yes[/green]" if row.identical else "[red]no[/red]",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
