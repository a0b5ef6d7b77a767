"""Demand beside migration, conservative mode and prefetch, on a slow drive modelled in virtual time.

    python -m bench.governor [--json OUT] [--reads N] [--requests N]

The whole cache floor over a drive of 1 GB/s that serves one request after the other, so the
numbers are the same on every machine. Limits: with migration that never ends, the p99 of demand
reads is at most 1.5 times what it is without; through a storm conservative mode makes p99.9 of
demand better, p99 at most 2 % worse (the governor alone keeps it) and throughput at most 5 %
lower; of what NVMe has, 80 % is in DRAM when a request asks for it that was queued 5 s before,
and at most 10 % is brought in vain.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path

import structlog
from prefixd_server.simulate.traces import read_trace

from tests.support.queued_trace import QueuedTrace
from tests.support.storm import StormResult, storm

P99_LIMIT = 1.5
THROUGHPUT_LIMIT = 0.95
IN_TIME_LIMIT = 0.8
USELESS_LIMIT = 0.1
CALM, STORM = 0.5, 0.92
"""Parts of the drive that demand takes."""
TRACE = Path(__file__).parents[1] / "tests/data/traces/mooncake_conversation_512.jsonl.zst"
AHEAD_S = 5.0


def of(result: StormResult) -> dict[str, float]:
    """The numbers of one storm."""
    return {
        "p50_ms": 1e3 * result.percentile(50),
        "p99_ms": 1e3 * result.percentile(99),
        "p99_9_ms": 1e3 * result.percentile(99.9),
        "reads_per_s": result.reads_per_s,
        "demoted_mb_per_s": result.demoted_bytes / result.span_s / 1e6,
    }


def storms(load: float, settings: tuple[str, str], reads: int) -> list[StormResult]:
    """The same demand under two settings of conservative mode."""
    results = []
    for setting in settings:
        with tempfile.TemporaryDirectory(prefix="pfx") as directory:
            results.append(storm(Path(directory), setting, load, reads))
        print(f"load {load:.2f}  conservative={setting:4}  " + "  ".join(
            f"{name} {value:.1f}" for name, value in of(results[-1]).items()
        ), flush=True)  # fmt: skip
    return results


def prefetch(requests: int) -> tuple[float, float]:
    """(in DRAM when asked for, brought in vain), both shares."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory:
        replay = QueuedTrace(read_trace(TRACE).part(0, requests), Path(directory), 1, 32, AHEAD_S)
        outcome = replay.run()
        replay.close()
    print(
        f"prefetch: {outcome.in_time:.1%} of {outcome.brought_in_time_blocks + outcome.stored_blocks:,} hits "
        f"of NVMe were in DRAM when asked for, {outcome.useless:.1%} of the bytes were brought in vain"
    )
    return outcome.in_time, outcome.useless


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--reads", type=int, default=900)
    parser.add_argument("--requests", type=int, default=600)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    alone, beside = storms(CALM, ("on", "off"), options.reads)
    without, helped = storms(STORM, ("off", "auto"), options.reads)
    in_time, useless = prefetch(options.requests)
    checks = {
        "p99_ratio": (beside.percentile(99) / alone.percentile(99), P99_LIMIT, True),
        "storm_p99_ratio": (helped.percentile(99) / without.percentile(99), 1.02, True),
        "storm_p99_9_ratio": (helped.percentile(99.9) / without.percentile(99.9), 1.0, True),
        "storm_throughput_ratio": (helped.reads_per_s / without.reads_per_s, THROUGHPUT_LIMIT, False),
        "prefetch_in_time": (in_time, IN_TIME_LIMIT, False),
        "prefetch_useless": (useless, USELESS_LIMIT, True),
    }
    missed = []
    for name, (value, limit, is_most) in checks.items():
        good = value <= limit if is_most else value >= limit
        missed += [] if good else [name]
        print(f"{name:24} {value:6.3f}  (limit: {'at most' if is_most else 'at least'} {limit})")
    print(f"conservative mode: entered {helped.entered_count} time(s), left: {helped.left}: {helped.reasons}")
    if options.json:
        options.json.write_text(json.dumps({name: value for name, (value, _, _) in checks.items()}, indent=1))
    if missed:
        raise SystemExit(f"limits missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
