"""The policy on the traces under tests/data: hits against the bars, LRU's known rows, and replay speed.

    python -m bench.simulate [--seeds N] [--trace NAME] [--fraction F,F] [--classics] [--json OUT]

Bars are prefix-hit tokens in %, as the mean over seeds, less half a point.
`second half` judges only requests after the first half of a trace. Speed is block
references per second of CPU time, the median over the replays of a trace. Exits
with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.study import Outcome, TraceSource, jobs_for, mean_over_seeds, run_job

TRACES = Path(__file__).parent.parent / "tests" / "data" / "traces"
SLACK = 0.5
LRU_SLACK = 0.3
CLASSICS = ("s3fifo", "wtinylfu", "gdsf", "arc", "2q", "optimum")


@dataclass(frozen=True, slots=True)
class Case:
    """What is demanded of one trace. Sizes are shares of the footprint, hits in %.

    lru: what leaf-first LRU gives at each size; bars: what importance has to give;
    stop_bars: the same where it is told how replies ended.
    """

    trace: str
    lru: dict[float, float]
    bars: dict[float, float]
    stop_bars: dict[float, float]
    references_per_s: float


CASES = {
    "conversation": Case(
        "mooncake_conversation_512",
        {0.01: 5.35, 0.05: 19.96, 0.1: 28.44, 0.2: 35.21, 0.5: 37.03},
        {0.01: 10.0, 0.05: 21.8, 0.1: 29.3, 0.2: 34.7},
        {},
        200_000,
    ),
    "claude-code": Case(
        "weka_claudecode_512",
        {0.005: 23.9, 0.01: 52.1, 0.02: 81.5, 0.05: 94.3, 0.1: 95.7, 0.2: 96.1, 0.5: 96.2},
        {0.005: 36.0, 0.01: 59.0, 0.02: 81.5, 0.05: 94.0},
        {0.01: 61.0, 0.02: 83.0},
        1_000_000,
    ),
    "lmcache": Case("lmcache_agents_16", {0.01: 50.0, 0.05: 0.0, 0.1: 0.0, 0.2: 0.0, 0.5: 0.0}, {}, {}, 0),
}
"""By short name. A 0 is a row that is not known beforehand."""


def replay(
    case: Case, policy: str, fractions: list[float], seeds: int, use_stops: bool = False
) -> dict[float, Outcome]:
    """The mean over seeds, by size."""
    source = TraceSource(TRACES / f"{case.trace}.jsonl.zst")
    jobs = jobs_for([source], [policy], fractions, list(range(seeds)), ServingModel(), use_stops)
    outcomes = []
    for job in jobs:
        print(f"  {policy} {100 * job.fraction:g} % seed {job.seed}", file=sys.stderr, end="\r")
        outcomes.append(run_job(job))
    return {outcome.fraction: outcome for outcome in mean_over_seeds(outcomes)}


def judge(
    name: str, case: Case, lru: dict[float, Outcome], ours: dict[float, Outcome], stops: bool
) -> Iterator[dict[str, Any]]:
    """One row per size."""
    bars = case.stop_bars if stops else case.bars
    for fraction, outcome in ours.items():
        hit, below = 100 * outcome.prefix_hit_token_ratio, 100 * lru[fraction].prefix_hit_token_ratio
        bar = max(bars.get(fraction, 0.0) - SLACK, below - SLACK)
        yield {
            "trace": name,
            "policy": "importance, stop reasons told" if stops else "importance",
            "fraction": fraction,
            "hit": hit,
            "spread": 100 * outcome.seed_spread,
            "second_half": 100 * outcome.second_half_prefix_hit_token_ratio,
            "lru": below,
            "bar": bar,
            "references_per_s": outcome.references_per_s,
            "missed": hit < bar,
        }


def judge_lru(name: str, case: Case, lru: dict[float, Outcome]) -> Iterator[dict[str, Any]]:
    """One row per size."""
    for fraction, outcome in lru.items():
        known, hit = case.lru[fraction], 100 * outcome.prefix_hit_token_ratio
        yield {
            "trace": name,
            "policy": "lru",
            "fraction": fraction,
            "hit": hit,
            "second_half": 100 * outcome.second_half_prefix_hit_token_ratio,
            "bar": known or None,
            "references_per_s": outcome.references_per_s,
            "missed": bool(known) and abs(hit - known) > LRU_SLACK,
        }


def judge_speed(name: str, case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median over the importance replays."""
    speed = statistics.median(row["references_per_s"] for row in rows)
    missed = speed < case.references_per_s
    return {"trace": name, "references_per_s": speed, "limit": case.references_per_s, "missed": missed}


def measure(
    name: str, case: Case, fractions: list[float], seeds: int, classics: bool
) -> Iterator[dict[str, Any]]:
    """All rows of one trace, as they come."""
    sizes = [fraction for fraction in case.lru if fraction in fractions or not fractions]
    lru = replay(case, "lru", sizes, 1)
    yield from judge_lru(name, case, lru)
    for policy in CLASSICS if classics else ():
        for fraction, outcome in replay(case, policy, sizes, 1).items():
            hit = 100 * outcome.prefix_hit_token_ratio
            yield {
                "trace": name,
                "policy": policy,
                "fraction": fraction,
                "hit": hit,
                "references_per_s": outcome.references_per_s,
                "missed": False,
            }
    learned = []
    for use_stops in (False, True):
        judged = [size for size in sizes if not use_stops or size in case.stop_bars]
        outcomes = replay(case, "importance", judged, seeds, use_stops)
        for row in judge(name, case, lru, outcomes, use_stops):
            learned.append(row)
            yield row
    if learned:
        yield judge_speed(name, case, learned)


def show(row: dict[str, Any]) -> str:
    """A row in words."""
    verdict = "MISSED" if row["missed"] else "ok"
    speed = f"{row['references_per_s'] / 1e3:6.0f} k references/s"
    if "hit" not in row:
        return f"{row['trace']:<13} speed, median {speed} (limit {row['limit'] / 1e3:.0f} k) {verdict}"
    text = f"{row['trace']:<13} {row['policy']:<30} {100 * row['fraction']:5g} %: {row['hit']:6.2f}"
    if "second_half" in row:
        text += f", second half {row['second_half']:6.2f}"
    if "spread" in row:
        text += f", spread {row['spread']:.2f}, LRU {row['lru']:6.2f}"
    return text + (f", bar {row['bar']:6.2f}" if row.get("bar") else "") + f", {speed} {verdict}"


def main() -> None:
    """Measures, prints, fails when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trace", choices=CASES, action="append")
    parser.add_argument("--fraction", default="", help="only these sizes, such as 0.01,0.02")
    parser.add_argument(
        "--classics", action="store_true", help="the established policies and the optimum too"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fractions = [float(part) for part in arguments.fraction.split(",") if part]
    rows = []
    for name in arguments.trace or CASES:
        for row in measure(name, CASES[name], fractions, arguments.seeds, arguments.classics):
            rows.append(row)
            print(show(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    sys.exit(any(row["missed"] for row in rows))


if __name__ == "__main__":
    main()
