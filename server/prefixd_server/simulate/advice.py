"""The answer in plain language: which policy, how much of each tier, what to expect."""

from __future__ import annotations

from prefixd_server.base.sizes import human_size
from prefixd_server.simulate.policies import DAEMON_POLICIES, OPTIMUM
from prefixd_server.simulate.shape import Shape
from prefixd_server.simulate.study import Outcome
from prefixd_server.simulate.tier_study import TierOutcome

ENOUGH = 0.95
"""Part of what an infinite cache hits, or of the best time saved, from where more space hardly pays."""
LATE_SHARE, LATE_S_MIN = 0.02, 1.0
"""The links are overloaded when they are busy after the last request has begun for more than this share of
the trace's length, and for more seconds than one request's own bytes may need."""
CLOSE = 0.005
"""Hit ratios this close count as equal; the simpler policy is named then."""


def advise_one_tier(outcomes: list[Outcome], shape: Shape, kv_bytes_per_token: int) -> list[str]:
    """Sentences for one trace replayed on one tier."""
    own = [outcome for outcome in outcomes if outcome.trace == shape.trace]
    policy = _best_policy(own)
    rows = sorted((o for o in own if o.policy == policy), key=lambda o: o.fraction)
    if not rows:
        return []
    goal = ENOUGH * shape.infinite_hit_token_ratio
    enough = next((row for row in rows if row.prefix_hit_token_ratio >= goal), None)
    chosen = enough or rows[-1]
    size = chosen.fraction * shape.footprint_tokens * kv_bytes_per_token
    lines = [
        f"An infinite cache would hit {100 * shape.infinite_hit_token_ratio:.1f} % of the input tokens; "
        f"the whole footprint is {human_size(shape.footprint_tokens * kv_bytes_per_token)}.",
        f"Run the policy {policy}.",
    ]
    if enough is None:
        lines.append(
            f"No size tried reaches {100 * ENOUGH:.0f} % of that; the largest, {human_size(int(size))}, hits "
            f"{100 * chosen.prefix_hit_token_ratio:.1f} %. Try larger sizes."
        )
    else:
        lines.append(
            f"Buy {human_size(int(size))} ({100 * chosen.fraction:g} % of the footprint): it hits "
            f"{100 * chosen.prefix_hit_token_ratio:.1f} %, and more space gains little."
        )
    lines.append(
        f"Expect a time to the first token of {chosen.ttft_p50_s:.2f} s at the median and "
        f"{chosen.ttft_p99_s:.2f} s at p99, loading not counted."
    )
    bound = next((o for o in own if o.policy == OPTIMUM and o.fraction == chosen.fraction), None)
    if bound is not None:
        gap = 100 * (bound.prefix_hit_token_ratio - chosen.prefix_hit_token_ratio)
        lines.append(
            f"No policy, even one that knew the future, could hit more than {gap:.1f} points above that."
        )
    return lines


def _best_policy(outcomes: list[Outcome]) -> str:
    """The daemon's policy with the best mean over the sizes; lru when it is as good."""
    means: dict[str, float] = {}
    for name in DAEMON_POLICIES:
        ratios = [o.prefix_hit_token_ratio for o in outcomes if o.policy == name]
        if ratios:
            means[name] = sum(ratios) / len(ratios)
    if not means:
        others = sorted({o.policy for o in outcomes if o.policy != OPTIMUM})
        return others[0] if others else OPTIMUM
    best = max(means, key=lambda name: means[name])
    return "lru" if means.get("lru", -1.0) >= means[best] - CLOSE else best


def advise_tiers(outcomes: list[TierOutcome], trace: str) -> list[str]:
    """Sentences for one trace replayed on nodes of several tiers."""
    own = [outcome for outcome in outcomes if outcome.trace == trace]
    best = min(own, key=lambda o: o.ttft_mean_s)
    worst = max(own, key=lambda o: o.ttft_mean_s)
    limit = worst.ttft_mean_s - ENOUGH * (worst.ttft_mean_s - best.ttft_mean_s)
    chosen = min(
        (o for o in own if o.ttft_mean_s <= limit + 1e-12),
        key=lambda o: (o.hbm_bytes, o.dram_bytes, o.nvme_bytes, o.ttft_mean_s),
    )
    sizes = {"HBM": chosen.hbm_bytes, "DRAM": chosen.dram_bytes, "NVMe": chosen.nvme_bytes}
    named = ", ".join(f"{human_size(size)} of {name}" for name, size in sizes.items() if size)
    hits = ", ".join(
        f"{100 * ratio:.1f} % from {tier}" for tier, ratio in chosen.hit_token_ratio_by_tier.items()
    )
    per_day = chosen.ssd_written_bytes / max(chosen.duration_s, 1.0) * 86400
    lines = [
        f"Of what was tried, buy {named} and run the policy {chosen.policy}.",
        f"It hits {100 * chosen.prefix_hit_token_ratio:.1f} % of the input tokens ({hits}).",
        f"Expect a time to the first token of {chosen.ttft_p50_s:.2f} s at the median, "
        f"{chosen.ttft_p99_s:.2f} s at p99 and {chosen.ttft_p999_s:.2f} s at p99.9, on the modelled links.",
    ]
    late = chosen.links_busy_s - chosen.duration_s - chosen.queue_s
    if late > max(LATE_S_MIN, LATE_SHARE * chosen.duration_s):
        lines.append(f"The links cannot keep up: the last transfer ends {late:.0f} s after the last request.")
    if chosen.nvme_bytes:
        lines.append(f"The drive is written at {human_size(int(per_day))} a day.")
    return lines
