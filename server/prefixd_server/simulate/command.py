"""`prefixd simulate`: what a cache of some sizes and policies would have done with a log of requests."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.sizes import human_size
from prefixd_server.simulate.advice import advise_one_tier, advise_tiers
from prefixd_server.simulate.arrivals import PREFILL_TOKENS_PER_S, TPOT_S, TTFT_BASE_S, ServingModel
from prefixd_server.simulate.options import (
    FRACTIONS_DEFAULT,
    fraction_list,
    output_path,
    policy_list,
    size_list,
)
from prefixd_server.simulate.page import render_page
from prefixd_server.simulate.policies import FLAT, OPTIMUM
from prefixd_server.simulate.processes import run_all
from prefixd_server.simulate.shape import Shape, shape_of
from prefixd_server.simulate.study import PINNING, Outcome, TraceSource, jobs_for, mean_over_seeds, run_job
from prefixd_server.simulate.tables import one_tier_table, tiers_table
from prefixd_server.simulate.tier_study import PINNING as TIER_PINNING
from prefixd_server.simulate.tier_study import TierJob, TierOutcome, run_tier_job
from prefixd_server.simulate.tiers import TierSizes
from prefixd_server.simulate.traces import name_of

KV_BYTES_PER_TOKEN = 131_072
"""An 8B model with 32 layers, 8 KV heads of 128, two bytes."""
PLAIN_WIDTH = 140
"""Columns of the table where the output is not a terminal."""
Job = TypeVar("Job")
Result = TypeVar("Result")


@click.command()
@click.argument(
    "traces", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--policy",
    "policies",
    default="importance,lru,optimum",
    callback=policy_list,
    show_default=True,
    help="Policies, separated by commas: importance, lru, gdsf, 2q, arc, s3fifo, wtinylfu, optimum.",
)
@click.option(
    "--fraction",
    "fractions",
    default=FRACTIONS_DEFAULT,
    callback=fraction_list,
    show_default=True,
    help="Sizes of one tier, as shares of the trace's footprint.",
)
@click.option(
    "--hbm",
    callback=size_list,
    help="GPU memory for KV, such as 40GiB; several separated by commas. Turns on the tier mode.",
)
@click.option("--dram", callback=size_list, help="Host memory, likewise.")
@click.option("--nvme", callback=size_list, help="NVMe, likewise.")
@click.option(
    "--queue",
    "queue_s",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Assumed wait in the engine's queue, seconds: what lies in NVMe is prefetched meanwhile.",
)
@click.option(
    "--kv-bytes-per-token",
    default=KV_BYTES_PER_TOKEN,
    show_default=True,
    type=click.IntRange(min=1),
    help="KV of one token, all layers.",
)
@click.option(
    "--block-tokens",
    default=512,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens of a block, for logs of prompts.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="tokenizer.json for logs of prompts; bytes count as tokens without it.",
)
@click.option(
    "--seeds", default=1, show_default=True, type=click.IntRange(1, 100), help="Random seeds to average over."
)
@click.option("--ignore-stop", is_flag=True, help="Do not use how replies ended, where the trace tells.")
@click.option(
    "--ttft-base",
    default=TTFT_BASE_S,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Assumed time to the first token when all hits, seconds.",
)
@click.option(
    "--prefill-rate",
    default=PREFILL_TOKENS_PER_S,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Assumed prefill rate, tokens per second.",
)
@click.option(
    "--tpot",
    default=TPOT_S,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Assumed time per output token, seconds.",
)
@click.option(
    "--processes", default=0, type=click.IntRange(min=0), help="Parallel processes; 0: one per core."
)
@click.option(
    "--json",
    "json_path",
    callback=output_path,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the results as a JSON list.",
)
@click.option(
    "--html",
    "html_path",
    callback=output_path,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a page with plots and a recommendation.",
)
def simulate(
    traces: tuple[Path, ...],
    policies: list[str],
    fractions: list[float],
    hbm: list[int],
    dram: list[int],
    nvme: list[int],
    queue_s: float,
    kv_bytes_per_token: int,
    block_tokens: int,
    tokenizer: Path | None,
    seeds: int,
    ignore_stop: bool,
    ttft_base: float,
    prefill_rate: float,
    tpot: float,
    processes: int,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Replay TRACES against caches of several sizes and policies.

    Hits are judged at arrival, cold start included. With --hbm, --dram or --nvme a
    node of several tiers is replayed, else one tier of each --fraction.
    """
    serving = ServingModel(ttft_base, prefill_rate, tpot)
    sources = _sources(traces, tokenizer, block_tokens)
    runner = _Runner(Console(stderr=True), processes or len(os.sched_getaffinity(0)))
    outcomes: list[Outcome] = []
    tier_outcomes: list[TierOutcome] = []
    sizes: list[TierSizes] = []
    if any((hbm, dram, nvme)):
        unfit = [name for name in policies if name in FLAT or name == OPTIMUM]
        if set(policies) <= set(unfit):
            raise click.UsageError(f"{', '.join(unfit)}: not for several tiers")
        if unfit:
            click.echo(f"left out, not for several tiers: {', '.join(unfit)}", err=True)
        sizes = [
            TierSizes(*of, kv_bytes_per_token)
            for of in itertools.product(hbm or [0], dram or [0], nvme or [0])
            if any(of)
        ]
        if not sizes:
            raise click.UsageError("--hbm, --dram and --nvme are all 0: give one of them a size")
    shapes = _shapes(runner, sources, sizes)
    if sizes:
        tier_jobs = [
            TierJob(source, policy, size, 0, serving, not ignore_stop, queue_s)
            for source in sources
            for policy in policies
            if policy not in unfit
            for size in sizes
        ]
        tier_outcomes = runner.run(run_tier_job, tier_jobs)
    else:
        jobs = jobs_for(sources, policies, fractions, list(range(seeds)), serving, not ignore_stop)
        outcomes = mean_over_seeds(runner.run(run_job, jobs))
    advice = _advice(shapes, outcomes, tier_outcomes, kv_bytes_per_token)
    _print(outcomes, tier_outcomes, advice)
    if json_path is not None:
        results = [one.as_json() for one in outcomes] + [node.as_json() for node in tier_outcomes]
        json_path.write_text(json.dumps(results, indent=1) + "\n")
    if html_path is not None:
        stated = assumptions(serving, kv_bytes_per_token, queue_s, tiers=bool(tier_outcomes))
        html_path.write_text(render_page(shapes, outcomes, tier_outcomes, advice, stated))


def assumptions(serving: ServingModel, kv_bytes_per_token: int, queue_s: float, *, tiers: bool) -> list[str]:
    """What the numbers rest on."""
    pinning = TIER_PINNING if tiers else PINNING
    queued = [f"Each request waits {queue_s:g} s in the engine's queue, told to the daemon as it begins to."]
    return (queued if tiers and queue_s else []) + [
        f"Hits are judged at arrival, cold start included; {pinning}.",
        f"Assumed: prefill of {serving.prefill_tokens_per_s:g} tokens/s, "
        f"{serving.ttft_base_s:g} s to the first token when all hits, {serving.tpot_s:g} s per output token. "
        "A reply's length and end are not known before it has ended.",
        f"{human_size(kv_bytes_per_token)} of KV per token.",
    ]


class _Runner:
    """Runs jobs with a progress bar on standard error."""

    def __init__(self, console: Console, process_count: int) -> None:
        self._console = console
        self._process_count = process_count

    def run(self, work: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("replaying", total=len(jobs))
            return run_all(work, jobs, self._process_count, lambda _result: progress.advance(task))


def _sources(paths: Sequence[Path], tokenizer: Path | None, block_tokens: int) -> list[TraceSource]:
    """Each trace once, by its file's name; by its path where several have that name."""
    distinct = list(dict.fromkeys(paths))
    times = Counter(name_of(path) for path in distinct)
    names = [name_of(path) if times[name_of(path)] == 1 else str(path) for path in distinct]
    return [
        TraceSource(path, tokenizer, block_tokens, name) for path, name in zip(distinct, names, strict=True)
    ]


def _shapes(runner: _Runner, sources: list[TraceSource], sizes: list[TierSizes]) -> list[Shape]:
    """Reads all traces, so that what is wrong with one or with a size is said before the first replay."""
    try:
        shapes = runner.run(_shape, sources)
        for shape, size in itertools.product(shapes, sizes):
            size.blocks(shape.block_tokens)
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    return shapes


def _shape(source: TraceSource) -> Shape:
    return shape_of(source.read())


def _advice(
    shapes: list[Shape], outcomes: list[Outcome], tier_outcomes: list[TierOutcome], kv_bytes_per_token: int
) -> dict[str, list[str]]:
    if tier_outcomes:
        return {shape.trace: advise_tiers(tier_outcomes, shape.trace) for shape in shapes}
    return {shape.trace: advise_one_tier(outcomes, shape, kv_bytes_per_token) for shape in shapes}


def _print(outcomes: list[Outcome], tier_outcomes: list[TierOutcome], advice: dict[str, list[str]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for trace, lines in advice.items():
        one = one_tier_table([outcome for outcome in outcomes if outcome.trace == trace])
        tiers = tiers_table([outcome for outcome in tier_outcomes if outcome.trace == trace])
        for table, pinning in ((one, PINNING), (tiers, TIER_PINNING)):
            if table.rows:
                shown = Table(*table.head, title=f"{trace}: {pinning}", box=None, padding=(0, 1))
                for row in table.rows:
                    shown.add_row(*row)
                console.print(shown)
        for line in lines:
            console.print(line, highlight=False)
