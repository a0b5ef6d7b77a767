"""The reuse index: LRU's order without evidence, and the best rate over all stopping times with it."""

from __future__ import annotations

import numpy as np
from prefixd_server.base.types import StopReason
from prefixd_server.policy.hazard import HazardTable, index_of
from prefixd_server.policy.signals import (
    AGE_BUCKET_COUNT,
    AGE_WIDTHS_S,
    CLASS_COUNT,
    NO_GAP,
    REPLY_COUNT,
    age_bucket,
    age_buckets,
    gap_code,
    history_byte,
    reply_byte,
)

FIRST = history_byte(NO_GAP, reused=False) * REPLY_COUNT
AGAIN = history_byte(gap_code(10.0), reused=True) * REPLY_COUNT


def watch(table: HazardTable, klass: int, ages_s: list[float], blocks: int, life_s: float) -> None:
    """`blocks` blocks of a class are reused at each of the ages; all others wait `life_s` in vain."""
    for age in ages_s:
        classes = np.full(blocks, klass)
        table.observe_reuses(classes, age_buckets(np.full(blocks, age)))
    step = 5.0
    for age in np.arange(0.0, life_s, step):
        waiting = blocks * max(1, sum(reused > age for reused in ages_s))
        seconds = np.array([waiting * step])
        table.observe_exposure(np.array([klass]), age_buckets(np.array([age])), seconds)


def test_without_evidence_the_order_is_lru_for_every_class() -> None:
    index = HazardTable().index.reshape(CLASS_COUNT, AGE_BUCKET_COUNT)
    assert (np.diff(index, axis=1) < 0).all()
    assert np.allclose(index, index[0])


def test_the_index_is_the_best_rate_over_stopping_times() -> None:
    """Against the definition on random hazards, where windows grow by about a half."""
    hazards = np.random.default_rng(4).uniform(1e-4, 0.05, (3, AGE_BUCKET_COUNT))
    index = index_of(hazards)
    for row in range(3):
        for start in range(AGE_BUCKET_COUNT):
            rates = np.array(_rates(hazards[row], start))
            assert index[row, start] <= rates.max() * (1 + 1e-9)
            assert index[row, start] >= rates[[0, min(1, len(rates) - 1), min(7, len(rates) - 1)]].max() * (
                1 - 1e-9
            )


def _rates(hazards: np.ndarray, start: int) -> list[float]:
    """Reuses per second of staying from `start` to each later bucket."""
    alive, gained, spent, rates = 1.0, 0.0, 0.0, []
    for bucket in range(start, AGE_BUCKET_COUNT):
        lost = alive * (1.0 - np.exp(-hazards[bucket] * AGE_WIDTHS_S[bucket]))
        gained, spent, alive = gained + lost, spent + lost / hazards[bucket], alive - lost
        rates.append(gained / spent)
    return rates


def test_waiting_is_worth_more_the_nearer_the_reuse_is() -> None:
    table = HazardTable()
    watch(table, FIRST, [60.0, 62.0], 400, 300.0)
    table.rebuild(1.0)
    index = table.index.reshape(CLASS_COUNT, AGE_BUCKET_COUNT)[FIRST]
    assert index[age_bucket(0.0)] < index[age_bucket(30.0)] < index[age_bucket(55.0)]
    assert index[age_bucket(250.0)] < index[age_bucket(55.0)] / 5


def test_what_is_reused_sooner_and_more_surely_is_worth_more() -> None:
    table = HazardTable()
    watch(table, FIRST, [100.0], 300, 1000.0)
    watch(table, AGAIN, [20.0, 22.0, 24.0], 300, 100.0)
    table.rebuild(1.0)
    index = table.index.reshape(CLASS_COUNT, AGE_BUCKET_COUNT)
    assert index[AGAIN][0] > 1.5 * index[FIRST][0]


def test_a_class_never_seen_follows_its_kind() -> None:
    table = HazardTable()
    watch(table, AGAIN, [20.0], 2000, 60.0)
    table.rebuild(1.0)
    index = table.index.reshape(CLASS_COUNT, AGE_BUCKET_COUNT)
    other = history_byte(gap_code(100.0), reused=True) * REPLY_COUNT
    never = history_byte(gap_code(100.0), reused=False) * REPLY_COUNT
    assert index[other][age_bucket(15.0)] > index[never][age_bucket(15.0)]


def test_old_evidence_fades() -> None:
    table = HazardTable()
    watch(table, FIRST, [20.0], 1000, 60.0)
    table.rebuild(1.0)
    before = table.index[FIRST * AGE_BUCKET_COUNT + age_bucket(15.0)]
    for _ in range(2000):
        table.decay(0.99)
    table.rebuild(1.0)
    fresh = HazardTable().index[FIRST * AGE_BUCKET_COUNT + age_bucket(15.0)]
    assert abs(table.index[FIRST * AGE_BUCKET_COUNT + age_bucket(15.0)] - fresh) < abs(before - fresh) / 100


def test_codes_cover_all_values_without_overlap() -> None:
    assert len(AGE_WIDTHS_S) == AGE_BUCKET_COUNT
    codes = {gap_code(gap) for gap in (None, 0.0, 8.0, 20.0, 50.0, 100.0, 200.0, 500.0, 5000.0)}
    assert codes == set(range(9))
    ends = {reply_byte(tokens, stop) for tokens in (1, 16, 200, 500, 900) for stop in StopReason}
    assert len(ends) == 20
    assert max(ends) < REPLY_COUNT
    assert min(ends) > 0
