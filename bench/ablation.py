"""What each signal of the importance policy is worth: replays with some of them ignored.

    python -m bench.ablation [--seeds N] [--case NAME] [--json OUT]

Prints prefix-hit tokens in %, the mean over seeds, of whole traces. Nothing is judged.
Without --case: the conversation trace at 1 and 5 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from prefixd_server.policy.cost import RecomputeCost
from prefixd_server.policy.importance import NEVER, ImportancePolicy
from prefixd_server.policy.lru import LruPolicy
from prefixd_server.policy.policy import Policy
from prefixd_server.policy.signals import Signal
from prefixd_server.simulate.replay import Replay
from prefixd_server.simulate.study import capacity_of
from prefixd_server.simulate.traces import Trace, read_trace

TRACES = Path(__file__).parent.parent / "tests" / "data" / "traces"
CASES = {
    "conversation 1 %": ("mooncake_conversation_512", 0.01),
    "conversation 5 %": ("mooncake_conversation_512", 0.05),
    "conversation 20 %": ("mooncake_conversation_512", 0.2),
    "Claude Code 1 %": ("weka_claudecode_512", 0.01),
    "Claude Code 2 %": ("weka_claudecode_512", 0.02),
}


class AdmittingAll(ImportancePolicy):
    """Stores every new block, whatever has to go for it."""

    def ceiling_for_new(self, history: int, depth: int = 0) -> float:
        """See ImportancePolicy."""
        del history, depth
        return NEVER


def by_cost(trace: Trace) -> ImportancePolicy:
    """Importance x the cost of recomputing the node's deepest block."""
    cost = RecomputeCost(1.0, trace.block_tokens)
    return ImportancePolicy(weight=cost.seconds)


def without(*ignored: Signal) -> Callable[[Trace], Policy]:
    """The policy that does not know these signals."""
    return lambda _trace: ImportancePolicy(ignored=ignored)


VARIANTS: dict[str, Callable[[Trace], Policy]] = {
    "lru": lambda _trace: LruPolicy(),
    "age only": without(*Signal),
    "age, reused": without(Signal.GAP, Signal.LIFE, Signal.REPLY_LENGTH, Signal.STOP),
    "age, gap": without(Signal.REUSED, Signal.LIFE, Signal.REPLY_LENGTH, Signal.STOP),
    "age, reply length": without(Signal.REUSED, Signal.GAP, Signal.STOP),
    "age, stop reason": without(Signal.REUSED, Signal.GAP, Signal.REPLY_LENGTH),
    "without reused": without(Signal.REUSED),
    "without gap": without(Signal.GAP),
    "without reply length": without(Signal.REPLY_LENGTH),
    "without stop reason": without(Signal.STOP),
    "without running or finished": without(Signal.LIFE),
    "without admission": lambda _trace: AdmittingAll(),
    "times recomputation cost": by_cost,
    "all signals": without(),
}
"""By name: a policy for a trace."""


def hit_percent(trace: Trace, policy: Policy, fraction: float, seed: int) -> float:
    """Prefix-hit tokens of all input tokens."""
    hits = Replay(trace, policy, capacity_of(trace, fraction), seed).run()
    tokens = np.minimum(hits * trace.block_tokens, trace.input_tokens)
    return float(100 * tokens.sum() / trace.input_tokens.sum())


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for case in arguments.case or list(CASES)[:2]:
        name, fraction = CASES[case]
        trace = read_trace(TRACES / f"{name}.jsonl.zst")
        rows[case] = {}
        for variant, make in VARIANTS.items():
            seeds = range(1 if variant == "lru" else arguments.seeds)
            hits = [hit_percent(trace, make(trace), fraction, seed) for seed in seeds]
            rows[case][variant] = float(np.mean(hits))
            print(f"{case:<18} {variant:<28} {rows[case][variant]:6.2f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
