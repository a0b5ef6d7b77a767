"""What the connector's scheduler side talks to, for tests that call its hooks by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prefixd_client.connectors.vllm.scheduler import SchedulerSide
from prefixd_client.values import RunHits, Tier, UsageReport

TOKENS = 16


class FakeLease:
    """A lease that counts how often it is given back."""

    token = b"t" * 16

    def __init__(self, hit_count: int, pending: int = 0) -> None:
        self.run = RunHits(((Tier.DRAM, hit_count - 1), (Tier.NVME, 1)), pending, 0)
        self.hit_count = hit_count
        self.is_over = False
        self.released = threading.Event()

    def expired(self) -> bool:
        return self.is_over

    def release(self) -> None:
        self.released.set()


class Cache:
    """The client, cranked by the test: answers come when `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.lease: FakeLease | None = FakeLease(10)
        self.asked: list[tuple[int, int]] = []
        self.stored = 0
        self.lease_after_waiting: FakeLease | None = None
        self.waits: list[float] = []
        self.reports: list[UsageReport] = []

    def acquire(
        self, _spec: Any, hashes: Any, skip: int, _request_id: str, wait_s: float
    ) -> FakeLease | None:
        assert self.may_answer.wait(10)
        if wait_s:
            self.waits.append(wait_s)
            return self.lease_after_waiting
        self.asked.append((len(hashes), skip))
        return self.lease

    def stored_count(self, _spec: Any, _hashes: Any) -> int:
        return self.stored

    def report_usage(self, _spec: Any, report: UsageReport) -> None:
        self.reports.append(report)


def request(name: str = "r", tokens: int = 200, **fields: Any) -> Any:
    """What the hooks read of vLLM's request."""
    known = {
        "request_id": name,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_output_tokens": 0,
        "num_computed_tokens": 0,
        "num_in_flight_tokens": 0,
        "block_hashes": [bytes([index]) * 32 for index in range(tokens // TOKENS)],
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "get_finished_reason": lambda: "length",
    }
    return SimpleNamespace(**(known | fields))


def answered(side: SchedulerSide, asked: Any, computed: int = 0) -> tuple[int | None, bool]:
    """Asks as the scheduler does, step after step, until there is an answer."""
    for _ in range(5000):
        found = side.matched_tokens(asked, computed)
        if found[0] is not None:
            return found
        threading.Event().wait(0.001)
    raise AssertionError("no answer")


def scheduled(*names: str, tables: Callable[[str], Any] = lambda _: [list(range(100))], **fields: Any) -> Any:
    """A step's SchedulerOutput."""
    known = {
        "num_scheduled_tokens": dict.fromkeys(names, 1),
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        "kv_connector_block_state": SimpleNamespace(get_block_ids=tables),
    }
    return SimpleNamespace(**(known | fields))
