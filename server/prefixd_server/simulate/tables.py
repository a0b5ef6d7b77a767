"""The results as tables of text: one form for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixd_server.base.sizes import human_size
from prefixd_server.simulate.shape import Shape
from prefixd_server.simulate.study import Outcome
from prefixd_server.simulate.tier_study import TierOutcome


@dataclass(frozen=True, slots=True)
class TextTable:
    """A heading, and rows of as many cells."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def one_tier_table(outcomes: Sequence[Outcome]) -> TextTable:
    """Results of one tier, for one trace."""
    head = (
        "trace",
        "policy",
        "size",
        "blocks",
        "hit tokens",
        "hit blocks",
        "TTFT mean",
        "p50",
        "p99",
        "p99.9",
    )
    rows = [
        (
            outcome.trace,
            outcome.policy,
            _percent(outcome.fraction, 4),
            f"{outcome.capacity_blocks:,}",
            _percent(outcome.prefix_hit_token_ratio),
            _percent(outcome.block_hit_ratio),
            *_times(outcome),
        )
        for outcome in outcomes
    ]
    return TextTable("One tier", head, rows)


def tiers_table(outcomes: Sequence[TierOutcome]) -> TextTable:
    """Results of several tiers, for one trace."""
    head = ("policy", "tiers", "hit tokens", "by tier", "TTFT mean", "p50", "p99", "p99.9")
    rows: list[tuple[str, ...]] = [
        (
            outcome.policy,
            sizes_of(outcome),
            _percent(outcome.prefix_hit_token_ratio),
            " + ".join(_percent(ratio) for ratio in outcome.hit_token_ratio_by_tier.values()),
            *_times(outcome),
            f"{outcome.tokens_saved / 1e6:.1f} M",
            human_size(outcome.ssd_written_bytes),
            human_size(sum(outcome.link_bytes.values())),
        )
        for outcome in outcomes
    ]
    return TextTable("Tiers", (*head, "tokens saved", "SSD written", "moved"), rows)


def hot_table(shape: Shape) -> TextTable:
    """The most used shared beginnings."""
    rows: list[tuple[str, ...]] = [
        (f"{hot.tokens:,}", f"{hot.request_count:,}", f"{hot.continuation_count:,}") for hot in shape.hot
    ]
    return TextTable("Hottest shared prefixes", ("length, tokens", "requests", "ways it goes on"), rows)


def sizes_of(outcome: TierOutcome) -> str:
    """The tiers, fastest first."""
    sizes = (("HBM", outcome.hbm_bytes), ("DRAM", outcome.dram_bytes), ("NVMe", outcome.nvme_bytes))
    return ", ".join(f"{name} {human_size(size)}" for name, size in sizes if size)


def _percent(ratio: float, digits: int = 2) -> str:
    text = f"{100 * ratio:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits > 2 else text} %"


def _times(outcome: Outcome | TierOutcome) -> tuple[str, ...]:
    times = (outcome.ttft_mean_s, outcome.ttft_p50_s, outcome.ttft_p99_s, outcome.ttft_p999_s)
    return tuple(f"{time:.2f} s" for time in times)
