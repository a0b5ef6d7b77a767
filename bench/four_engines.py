"""Four engine processes at once, against four processes that only copy and checksum.

    python -m bench.four_engines [--engines N] [--blocks N] [--rounds N] [--json OUT]

Every process has its own engine memory and its own run of 256 blocks of 1 MiB.
In each round all of them get at once (acquire, load, release, four times over) and
put at once (reserve, store, commit, four runs). The limit, in the same processes and
the same round: ctypes.memmove between the same blocks and the very same slots, and
XXH3_64 over the same engine memory, block by block, as many times. A phase lasts from
the first start to the last end; several gets and puts make it long against the moment
in which the last process ends alone, which is the scheduler's doing. The median over
the rounds of limit / ours is judged, both ways: 0.90.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import xxhash
from prefixd_client import Client

from bench.client_put_get import OPTIONS, Bench, spec_of

LIMIT = 0.90
BLOCK_BYTES = 1 << 20
GETS = 4
"""Times that each process gets its run in one phase."""
PUTS = 4
"""Runs that each process puts in one phase."""
START_TIMEOUT_S = 120.0
PHASES = ("limit_get", "get", "limit_put", "put")

Span = tuple[float, float]
"""When a phase began and ended in one process; seconds of the machine's monotonic clock."""


class Engine:
    """One engine process: takes part in every phase, and notes when."""

    def __init__(self, bench: Bench, barrier: Barrier) -> None:
        self._bench = bench
        self._barrier = barrier

    def round(self) -> dict[str, Span]:
        """One span per phase."""
        bench = self._bench
        taken = {"limit_get": self._together(self._copy_out), "get": self._together(self._get)}
        runs = [[os.urandom(32) for _ in bench.blocks] for _ in range(PUTS)]
        leases = [bench.namespace.reserve(run) for run in runs]
        slots = [bench.slots(lease, lease._extents) for lease in leases if lease is not None]
        taken["limit_put"] = self._together(lambda: self._copy_in(slots))
        for lease in leases:
            assert lease is not None
            lease.abort()
        bench.wait_for_writes()
        taken["put"] = self._together(lambda: self._put(runs))
        for run in runs:
            bench.evict(run)
        return taken

    def _together(self, work: Callable[[], None]) -> Span:
        self._barrier.wait(START_TIMEOUT_S)
        began = time.monotonic()
        work()
        return began, time.monotonic()

    def _get(self) -> None:
        for _ in range(GETS):
            self._bench.get()

    def _copy_out(self) -> None:
        bench = self._bench
        for _ in range(GETS):
            for target, source, block in zip(bench.addresses, bench.kept_slots, bench.blocks, strict=True):
                ctypes.memmove(target, source, BLOCK_BYTES)
                xxhash.xxh3_64_intdigest(block)

    def _put(self, runs: list[list[bytes]]) -> None:
        for run in runs:
            self._bench.put(run)

    def _copy_in(self, slots_of_runs: list[list[int]]) -> None:
        bench = self._bench
        for slots in slots_of_runs:
            for target, source, block in zip(slots, bench.addresses, bench.blocks, strict=True):
                xxhash.xxh3_64_intdigest(block)
                ctypes.memmove(target, source, BLOCK_BYTES)


def engine_process(
    socket: str, block_count: int, round_count: int, barrier: Barrier, out: Connection
) -> None:
    """Runs one engine; sends the spans of its rounds, the first of which warmed up and is left out."""
    with Client(socket, engine_name="bench", options=OPTIONS) as client:
        deadline = time.monotonic() + START_TIMEOUT_S
        while client.status().state != "ready":
            if time.monotonic() > deadline:
                raise TimeoutError(f"the daemon did not start: {client.status()}")
            time.sleep(0.02)
        engine = Engine(
            Bench(client.namespace(spec_of(BLOCK_BYTES)), block_count, BLOCK_BYTES, socket), barrier
        )
        engine.round()
        out.send([engine.round() for _ in range(round_count)])


def run_engines(
    socket: Path, engine_count: int, block_count: int, round_count: int
) -> list[dict[str, float]]:
    """Seconds of each phase, from the first start to the last end, per round."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(engine_count)
    pipes = [context.Pipe(duplex=False) for _ in range(engine_count)]
    processes = [
        context.Process(target=engine_process, args=(str(socket), block_count, round_count, barrier, sender))
        for _, sender in pipes
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        of_engines: list[list[dict[str, Span]]] = [receiver.recv() for receiver, _ in pipes]
    finally:
        for process in processes:
            process.join(START_TIMEOUT_S if process.exitcode is None else 0)
            process.kill()
    return [
        {phase: max(e[phase][1] for e in at_once) - min(e[phase][0] for e in at_once) for phase in PHASES}
        for at_once in zip(*of_engines, strict=True)
    ]


def measure(engine_count: int, block_count: int, round_count: int) -> dict[str, float]:
    """Medians in seconds, and the two ratios."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory:
        socket = Path(directory) / "p.sock"
        dram_mib = (PUTS + 2) * engine_count * block_count * BLOCK_BYTES >> 20
        flags = ["--socket", str(socket), "--dram-size", f"{dram_mib}MiB", "--log-level", "warning"]
        daemon = subprocess.Popen([str(Path(sys.executable).with_name("prefixd")), "serve", *flags])
        try:
            rounds = run_engines(socket, engine_count, block_count, round_count)
        finally:
            daemon.terminate()
            daemon.wait()
    result = {phase: statistics.median(taken[phase] for taken in rounds) for phase in PHASES}
    for way in ("get", "put"):
        result[f"{way}_ratio"] = statistics.median(taken[f"limit_{way}"] / taken[way] for taken in rounds)
    return result


def main() -> None:
    """Measures and prints; exit status 1 when a ratio is below its limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.engines, arguments.blocks, arguments.rounds)
    size = arguments.engines * arguments.blocks * BLOCK_BYTES
    for phase in PHASES:
        times = GETS if "get" in phase else PUTS
        rate = times * size / result[phase]
        print(f"{phase:9} {1e3 * result[phase]:8.1f} ms {rate / 1e9:6.1f} GB/s together")
    ratios = [result["get_ratio"], result["put_ratio"]]
    print(
        f"{arguments.engines} engines: get {ratios[0]:.2f}, put {ratios[1]:.2f} of memcpy plus checksum "
        f"(limit {LIMIT:.2f}) {'ok' if min(ratios) >= LIMIT else 'MISSED'}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    sys.exit(min(ratios) < LIMIT)


if __name__ == "__main__":
    main()
