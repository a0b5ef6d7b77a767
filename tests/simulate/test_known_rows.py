"""The conversation trace, whole: LRU hits what is known of it, importance what it has to."""

from __future__ import annotations

import pytest
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.study import Job, Outcome, TraceSource, run_job

from tests.support.requests import TRACES

SOURCE = TraceSource(TRACES / "mooncake_conversation_512.jsonl.zst")


def replayed(policy: str, fraction: float) -> Outcome:
    return run_job(Job(SOURCE, policy, fraction, seed=0, serving=ServingModel(), use_stops=True))


@pytest.mark.parametrize(
    ("policy", "fraction", "percent"), [("lru", 0.01, 5.35), ("lru", 0.2, 35.21), ("optimum", 0.01, 25.1)]
)
def test_known_policies_give_their_known_hits(policy: str, fraction: float, percent: float) -> None:
    assert 100 * replayed(policy, fraction).prefix_hit_token_ratio == pytest.approx(percent, abs=0.1)


def test_importance_nearly_doubles_what_lru_hits_under_pressure() -> None:
    outcome = replayed("importance", 0.01)
    assert 100 * outcome.prefix_hit_token_ratio > 9.5
    assert 100 * outcome.second_half_prefix_hit_token_ratio > 9.5
