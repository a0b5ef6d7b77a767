"""Whether the simulator predicts the daemon: the same trace through both, hits per tier compared.

    python -m bench.agreement [--requests N] [--json OUT]

The conversation trace, blocks of 4 KiB, on virtual time (tests/support/live_replay.py). Per
policy and sizes: percent of the blocks asked for that each tier hits, and the difference, of
which the limit is one point.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import structlog
from prefixd_server.simulate.traces import read_trace

from tests.support.live_replay import SLOTS_PER_SEGMENT, agreement, spread

TRACE = Path(__file__).parents[1] / "tests" / "data" / "traces" / "mooncake_conversation_512.jsonl.zst"
SIZES = ((8, 0), (2, 10), (4, 26), (8, 14), (8, 52))
LIMIT_POINTS = 1.0


def main() -> None:
    """Replays, prints, judges; exit status 1 when they disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    trace = spread(read_trace(TRACE).part(0, arguments.requests))
    rows = []
    for policy in ("importance", "lru"):
        for dram, nvme in SIZES:
            with tempfile.TemporaryDirectory() as directory:
                found = agreement(trace, Path(directory), dram, nvme, policy)
            assert found.problems == []
            for tier, percent in found.daemon.items():
                predicted = found.simulator[tier]
                size = SLOTS_PER_SEGMENT * (dram if tier.name == "DRAM" else nvme)
                rows.append({"policy": policy, "tier": tier.name, "daemon": percent, "simulator": predicted})
                print(
                    f"  {policy:10} {tier.name} about {size:,} blocks: daemon {percent:.2f} %, simulator "
                    f"{predicted:.2f} %, apart {percent - predicted:+.2f}"
                )
    missed = any(abs(row["daemon"] - row["simulator"]) > LIMIT_POINTS for row in rows)
    print(f"limit: {LIMIT_POINTS:g} point per tier: {'MISSED' if missed else 'held'}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))
    sys.exit(missed)


if __name__ == "__main__":
    main()
