"""The watched sample: what it counts, what it forgets, and that its rates are unbiased."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.types import StopReason
from prefixd_server.policy.hazard import HazardTable
from prefixd_server.policy.importance import ImportancePolicy
from prefixd_server.policy.signals import REPLY_COUNT
from prefixd_server.policy.tracker import RATE_START, SLOT_COUNT, ReuseTracker


def hashes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, (count, 4), dtype=np.uint64)


def test_about_the_sampling_rate_of_all_blocks_is_watched() -> None:
    tracker = ReuseTracker(HazardTable())
    watched = tracker.find(hashes(1, 20_000), 0.0)
    assert len(watched.index) == pytest.approx(RATE_START * 20_000, rel=0.05)


def test_a_second_use_finds_the_blocks_of_the_first() -> None:
    tracker = ReuseTracker(HazardTable())
    run = hashes(2, 200)
    first = tracker.find(run, 10.0)
    assert not first.known.any()
    tracker.used(first, 0, REPLY_COUNT)
    second = tracker.find(run, 25.0)
    assert second.known.mean() > 0.95
    position, last_use = tracker.last_use_of_deepest(second) or (-1, -1.0)
    assert last_use == 10.0
    assert position >= 190


def test_the_end_of_a_reply_changes_only_what_was_not_used_since() -> None:
    hazards = HazardTable()
    tracker = ReuseTracker(hazards)
    run = hashes(3, 400)
    whole = tracker.find(run, 0.0)
    tracker.used(whole, 0, REPLY_COUNT)
    part = tracker.find(run[:200], 5.0)
    tracker.used(part, 0, REPLY_COUNT)
    tracker.finished(whole, 7)
    classes = tracker._class[whole.slots]
    later = whole.index >= 200
    assert (classes[later] == 7).mean() > 0.95
    assert (classes[~later] == REPLY_COUNT).mean() > 0.95


def test_a_workload_larger_than_the_table_is_watched_more_thinly() -> None:
    tracker = ReuseTracker(HazardTable())
    for part in range(40):
        tracker.used(tracker.find(hashes(100 + part, 10_000), float(part)), 0, REPLY_COUNT)
    assert tracker.rate < RATE_START
    assert np.count_nonzero(tracker._key) < SLOT_COUNT


def test_what_is_older_than_the_horizon_is_forgotten_first() -> None:
    tracker = ReuseTracker(HazardTable())
    old = hashes(5, 4000)
    tracker.used(tracker.find(old, 0.0), 0, REPLY_COUNT)
    for part in range(30):
        now = 2 * tracker.horizon_s + part * tracker.horizon_s
        tracker.used(tracker.find(hashes(200 + part, 10_000), now), 0, REPLY_COUNT)
    assert tracker.rate == RATE_START
    assert not tracker.find(old, 40 * tracker.horizon_s).known.any()


def test_the_learned_rate_is_the_true_one() -> None:
    """Blocks come back after 40 s with certainty, or never: half and half."""
    policy = ImportancePolicy()
    sent: list[tuple[float, np.ndarray]] = []
    for step in range(600):
        now = step * 2.0
        while sent and sent[0][0] <= now - 40.0:
            policy.on_access(sent.pop(0)[1], 0, 0.0, 0, now)
        run = hashes(1000 + step, 12)
        access = policy.on_access(run, 0, 0.0, 0, now)
        policy.on_finish(access, 100, StopReason.UNKNOWN)
        if step % 2:
            sent.append((now, run))
    policy.tracker.report()
    reuses = policy.hazards._reuses[:REPLY_COUNT].sum()
    watched = 12 * 600 * policy.tracker.rate
    assert reuses == pytest.approx(watched / 2, rel=0.25)
