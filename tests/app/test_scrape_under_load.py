"""A scrape while engines and tiers work: it parses, every metric is there, and the books balance in each."""

from __future__ import annotations

import random
import re
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator

import pytest
from prefixd_server.base.metrics import metrics_table
from prometheus_client.parser import text_string_to_metric_families

from tests.support.nvme_daemon import Load, NvmeDaemon
from tests.support.ports import free_port
from tests.support.wire import short_directory

SCRAPES = 12
LOADS = 2
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> Samples:
    """One scrape, parsed."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, *by: str) -> dict[tuple[str, ...], float]:
    """The sum of a metric's samples for each value of some labels."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for (found, labels), value in samples.items():
        if found == name:
            sums[tuple(dict(labels)[label] for label in by)] += value
    return dict(sums)


@pytest.fixture
def daemon() -> Iterator[tuple[NvmeDaemon, int]]:
    """A daemon with two tiers, and the port of its metrics."""
    port = free_port()
    with (
        short_directory() as directory,
        NvmeDaemon(directory, environment={"PREFIXD_METRICS": f"127.0.0.1:{port}"}) as daemon,
    ):
        yield daemon, port


def work(daemon: NvmeDaemon, seed: int, over: threading.Event) -> None:
    """Puts, gets and evictions until it is over."""
    load = Load(random.Random(seed), drop_share=0.0)
    load.begin(daemon)
    while not over.is_set():
        load.run(daemon, 5)


def test_every_scrape_under_load_parses_and_balances(daemon: tuple[NvmeDaemon, int]) -> None:
    node, port = daemon
    over = threading.Event()
    threads = [threading.Thread(target=work, args=(node, seed, over)) for seed in range(LOADS)]
    for thread in threads:
        thread.start()
    try:
        scrapes = [scrape(port)]
        while len(scrapes) < SCRAPES or not total(scrapes[-1], "prefixd_tier_crossing_bytes_total"):
            scrapes.append(scrape(port))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for samples in scrapes:
        asked = total(samples, "prefixd_blocks_asked_total", "tenant")
        hits = total(samples, "prefixd_block_hits_total", "tenant")
        pending = total(samples, "prefixd_blocks_pending_total", "tenant")
        missed = total(samples, "prefixd_blocks_missed_total", "tenant")
        assert asked == {tenant: hits[tenant] + pending[tenant] + missed[tenant] for tenant in asked}
        slots = total(samples, "prefixd_tier_assigned_slots", "tier")
        assert slots == total(samples, "prefixd_tier_slots", "tier")
    first, last = scrapes[0], scrapes[-1]
    committed = [total(samples, "prefixd_blocks_committed_total")[()] for samples in (first, last)]
    assert committed[0] < committed[1]
    names = {name for name, _ in last}
    served = set(re.findall(r"^\| `(\w+)` \| \w+", metrics_table(), re.MULTILINE))
    rare = {"prefixd_rpc_errors_total", *(name for name in served if name.startswith("prefixd_device_"))}
    """No call has failed, and no tier lies on GPUs."""
    assert {name for name in served if name not in names and f"{name}_bucket" not in names} <= rare


def test_a_crossing_is_timed_and_its_bytes_are_counted_both_ways(daemon: tuple[NvmeDaemon, int]) -> None:
    node, port = daemon
    load = Load(random.Random(5), drop_share=0.0)
    load.begin(node)
    crossed: dict[tuple[str, ...], float] = {}
    while {("dram", "nvme"), ("nvme", "dram")} - crossed.keys():
        load.run(node, 20)
        load.verify(node, share=0.5)
        samples = scrape(port)
        crossed = total(samples, "prefixd_tier_crossing_bytes_total", "source", "target")
    timed = total(samples, "prefixd_tier_crossing_seconds_count", "source", "target")
    assert timed.keys() == crossed.keys()
    assert all(count >= 1 for count in timed.values())
    assert all(amount % 65_536 == 0 and amount > 0 for amount in crossed.values())
