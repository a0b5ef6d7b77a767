"""CPU time of the connector's hooks on the scheduler's thread with 64 requests waiting: p99 at most 200 us.

    python -m bench.vllm.hooks

vLLM's own scheduler, a real daemon, no model. Once with the daemon answering and once with it stopped, where
the time that passes must not grow either: hooks never wait.
"""

from __future__ import annotations

import gc
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.daemon_command import DaemonCommand
from tests.support.vllm_harness import VOCABULARY, Harness, model_directory

LIMIT_US = 200.0
WAITING = 64
ROUNDS = 3
"""So that a 99th percentile is not the worst of 64 calls."""
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)


def watch(engine: Harness) -> dict[str, list[tuple[float, float]]]:
    """Times every hook from now on: (CPU, passed) in us per call."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name in HOOKS:
        setattr(engine.connector, name, _timed(getattr(engine.connector, name), times[name]))
    return times


def _timed(hook: Any, times: list[tuple[float, float]]) -> Any:
    def run(*arguments: Any) -> Any:
        passed, cpu = time.perf_counter_ns(), time.thread_time_ns()
        answer = hook(*arguments)
        times.append(((time.thread_time_ns() - cpu) / 1e3, (time.perf_counter_ns() - passed) / 1e3))
        return answer

    return run


def prompts(seed: int) -> list[list[int]]:
    """64 prompts of 1,900 tokens that share their first half in fours."""
    random = np.random.default_rng(seed)
    halves = [random.integers(3, VOCABULARY, 950).tolist() for _ in range(WAITING // 4)]
    return [[*halves[index // 4], *random.integers(3, VOCABULARY, 950).tolist()] for index in range(WAITING)]


def measure(daemon: DaemonCommand, model: Path, *, stopped: bool) -> bool:
    """One run; prints its table. Whether every hook kept the limit."""
    with Harness(daemon.socket, model, block_count=400, step_tokens=512, weights_revision="bench") as engine:
        if stopped:
            daemon.signal(signal.SIGSTOP)
        gc.collect()
        gc.freeze()  # as vLLM's core does once it has started
        times = watch(engine)
        for seed in range(ROUNDS):
            for tokens in prompts(seed):
                engine.add(tokens, 40)
            engine.run(steps_max=100_000)
        if stopped:
            daemon.signal(signal.SIGCONT)
    print(f"daemon {'stopped' if stopped else 'answering'}: CPU us p50 / p99, passed us p99, calls")
    kept = True
    for name in HOOKS:
        if times[name]:
            cpu, passed = np.array(times[name]).T
            p99 = float(np.percentile(cpu, 99))
            kept &= p99 <= LIMIT_US
            print(
                f"  {name:32} {np.median(cpu):6.1f} {p99:7.1f} {np.percentile(passed, 99):9.1f} {len(cpu):7d}"
                f"{'' if p99 <= LIMIT_US else f'  above {LIMIT_US:.0f}'}"
            )
    return kept


def main() -> int:
    """Both runs; 1 when a hook is above the limit."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory:
        model = model_directory(Path(directory) / "model")
        with DaemonCommand(Path(directory), dram="256MiB") as daemon:
            kept = [measure(daemon, model, stopped=stopped) for stopped in (False, False, True)]
    return int(not all(kept[1:]))


if __name__ == "__main__":
    sys.exit(main())
