"""The soak: engines come, go and are killed for so many minutes, while daemon and disk are ill-treated.

python -m tests.soak [--minutes 20] [--seed N]

In the first part the daemon is killed and taken over, too, and its disk is full once and slow once. In the
second only engines come and go, so that one daemon's holdings can be compared between two moments of rest.
Exits with 1, and says why, when anything has grown, an identity does not hold, or an engine has seen an error
or a wrong byte.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from tests.soak.growth import Holdings, at_rest, grown, memory_bytes, memory_grown
from tests.soak.node import SoakNode, soak_node

ENGINE_COUNT_MAX = 4
ROUGH_SHARE = 0.6
"""Of the time, the first part."""
ILL_SHARE = 0.05
"""Of the time, how long the disk is full, and how long it is slow."""
SLOW_S = 1.2
"""More than nvme.latency_max_s."""
SUFFERED = ("NVMe tier full", "NVMe tier paused")
"""What the log says when the disk was ill: without it the soak has shown nothing."""
STEP_S = 1.5
"""Between two events."""
DAEMON_TROUBLE_STEPS = 12
"""The daemon is killed or taken over so seldom, and at least once each."""


class Soak:
    """One run."""

    def __init__(self, node: SoakNode, rng: random.Random, span_s: float) -> None:
        self._node = node
        self._rng = rng
        self._span_s = span_s
        self._began = time.monotonic()
        self.problems: list[str] = []
        self.told = {"kills": 0, "restarts": 0, "takeovers": 0}

    @property
    def _share(self) -> float:
        """Of the time, what has passed."""
        return (time.monotonic() - self._began) / self._span_s

    def run(self) -> None:
        """All of it; what is wrong stands in `problems`."""
        node = self._node
        self._rough()
        self._settle()
        before = self._rest()
        samples = list(self._gentle())
        after = self._rest()
        self.problems += grown(before, after) + memory_grown(samples)
        self.problems += node.daemon.problems()
        if node.total["raised"] or node.total["wrong"] or not node.total["read"]:
            self.problems.append(f"engines saw {dict(node.total)}")
        log = node.daemon.log
        self.problems += node.errors + bad_lines(log)
        self.problems += [f"the log never said: {event}" for event in SUFFERED if event not in log]
        states = {tier.state for tier in node.daemon.stats().tiers}
        if states != {"ready"}:
            self.problems.append(f"in the end the tiers are {states}")
        shown = samples[:: max(1, len(samples) // 12)]
        print(f"before: {before}\nafter:  {after}")
        print("memory:", *(f"{sample / 1e6:.1f}" for sample in shown), "MB")

    # -- the parts -----------------------------------------------------------------------------

    def _rough(self) -> None:
        node, rng = self._node, self._rng
        events: list[tuple[float, str, Callable[[], None]]] = [
            (0.10, "killed", self._restart),
            (0.15, "full", node.disk.fill),
            (0.15 + ILL_SHARE, "room again", node.disk.heal),
            (0.30, "taken over", self._take_over),
            (0.35, "slow", partial(node.disk.slow, SLOW_S)),
            (0.35 + ILL_SHARE, "fast again", node.disk.heal),
            (0.50, "taken over", self._take_over),
        ]
        for share, what, event in [*events, (ROUGH_SHARE, "killed", self._restart)]:
            while self._share < share:
                self._engines_change()
                if share >= 0.5 and rng.random() < 1 / DAEMON_TROUBLE_STEPS:
                    rng.choice([self._restart, self._take_over])()
            event()
            stats = node.daemon.stats()
            nvme = [tier.state for tier in stats.tiers][-1]
            print(f"{self._share:4.0%} {what}; {stats.session_count} sessions, NVMe {nvme}", flush=True)

    def _settle(self) -> None:
        """A tenth of the time: memory and NVMe fill, so that what comes later replaces what was there."""
        until = self._share + 0.1
        while self._share < until:
            self._engines_change()

    def _gentle(self) -> Iterator[int]:
        """The rest of the time; the daemon's memory at each step."""
        while self._share < 1 or self._node.engines == []:
            self._engines_change()
            yield memory_bytes(self._node.pid)

    # -- events --------------------------------------------------------------------------------

    def _engines_change(self) -> None:
        node, rng = self._node, self._rng
        if len(node.engines) < ENGINE_COUNT_MAX and rng.random() < 0.7:
            node.engine_comes()
        elif node.engines and rng.random() < 0.4:
            killed = rng.random() < 0.6
            self.told["kills"] += killed
            node.engine_goes(killed=killed)
        time.sleep(STEP_S)  # the pace of events, which no state marks

    def _restart(self) -> None:
        self.told["restarts"] += 1
        self._node.restart()

    def _take_over(self) -> None:
        self.told["takeovers"] += 1
        self._node.take_over()

    def _rest(self) -> Holdings:
        """What the daemon holds when nobody is there."""
        node = self._node
        node.empty()
        self.problems += node.daemon.problems()
        return at_rest(node.pid, node.directory)


def bad_lines(log: str) -> list[str]:
    """Lines of the daemons' logs that tell of a mistake of their own."""
    bad = []
    for line in log.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            if told["level"] == "critical" or told["event"] == "unexpected exception":
                bad.append(line)
        elif line.startswith("Traceback"):
            bad.append(line)
    return bad


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    given = parser.parse_args()
    print(f"soak: {given.minutes:g} minutes, --seed {given.seed}", flush=True)
    rng = random.Random(given.seed)
    with soak_node(rng) as node:
        soak = Soak(node, rng, given.minutes * 60)
        soak.run()
    print(f"{soak.told}, {dict(node.total)}")
    for problem in soak.problems:
        print(f"soak: {problem}", file=sys.stderr)
    print("soak: failed" if soak.problems else "soak: passed")
    return bool(soak.problems)


if __name__ == "__main__":
    sys.exit(main())
