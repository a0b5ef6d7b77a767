"""The report as one HTML page: plots, tables and the recommendation. Self-contained; nothing is requested."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from prefixd_server.simulate.policies import OPTIMUM
from prefixd_server.simulate.shape import Histogram, Shape
from prefixd_server.simulate.study import Outcome
from prefixd_server.simulate.svg import Series, bar_chart, line_chart
from prefixd_server.simulate.tables import TextTable, hot_table, one_tier_table, sizes_of, tiers_table
from prefixd_server.simulate.tier_study import TIME_BIN_COUNT, TierOutcome

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #f6f8fa; --text: #1f2328; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #161b22; --text: #e6edf3; --page: #0d1117; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1340px; padding: 24px;
  color: var(--text); background: var(--page); }
h1 { font-size: 26px; } h2 { margin-top: 40px; border-top: 1px solid var(--line); padding-top: 20px; }
h3 { font-size: 15px; margin: 0 0 6px; } h3.table { margin-top: 24px; }
.grid-of-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 20px; }
figure { margin: 0; padding: 14px; border: 1px solid var(--line); border-radius: 8px; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
svg .grid { stroke: var(--line); }
.legend span { margin-right: 14px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; border-radius: 3px; }
.advice { background: var(--soft); border-left: 4px solid #1f6feb; padding: 12px 18px; border-radius: 4px; }
.advice p { margin: 4px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: 4px 12px; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; }
.scroll { overflow-x: auto; } small { opacity: .75; }
"""


def render_page(
    shapes: Sequence[Shape],
    outcomes: Sequence[Outcome],
    tier_outcomes: Sequence[TierOutcome],
    advice: dict[str, list[str]],
    assumptions: Sequence[str],
) -> str:
    """The whole page.

    Args:
        advice: sentences, by trace.
        assumptions: what the numbers rest on.
    """
    sections = []
    for shape in shapes:
        one = [outcome for outcome in outcomes if outcome.trace == shape.trace]
        tiers = [outcome for outcome in tier_outcomes if outcome.trace == shape.trace]
        sections.append(_section(shape, one, tiers, advice.get(shape.trace, [])))
    stated = "".join(f"<li>{escape(line)}</li>" for line in assumptions)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>prefixd simulate</title><style>{_STYLE}</style></head><body>"
        f"<h1>What a prefix cache would do</h1><small><ul>{stated}</ul></small>"
        f"{''.join(sections)}</body></html>\n"
    )


def _section(shape: Shape, one: list[Outcome], tiers: list[TierOutcome], advice: list[str]) -> str:
    charts = [_figure(title, chart) for title, chart in _charts(shape, one, tiers) if chart]
    told = "".join(f"<p>{escape(line)}</p>" for line in advice)
    parts = [f"<h2>{escape(shape.trace)}</h2>", f"<p>{escape(_facts(shape))}</p>"]
    if told:
        parts.append(f'<div class="advice"><h3>Recommendation</h3>{told}</div>')
    parts.append(f'<p></p><div class="grid-of-charts">{"".join(charts)}</div>')
    parts += [_table(table) for table in (one_tier_table(one), tiers_table(tiers), hot_table(shape))]
    return "".join(parts)


def _facts(shape: Shape) -> str:
    return (
        f"{shape.request_count:,} requests in {shape.duration_s / 3600:.1f} h, "
        f"{shape.mean_input_tokens:,.0f} input tokens each, {shape.footprint_tokens / 1e6:.1f} M distinct. "
        f"{100 * shape.reused_block_ratio:.0f} % of blocks are used again, half of these within "
        f"{shape.reuse_gap_p50_s:.0f} s. "
        f"An infinite cache hits {100 * shape.infinite_hit_token_ratio:.1f} % of the tokens."
    )


def _figure(title: str, chart: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{chart}</figure>"


def _charts(shape: Shape, one: list[Outcome], tiers: list[TierOutcome]) -> list[tuple[str, str]]:
    charts = []
    if one:
        charts += [
            (
                "Hit ratio against size",
                _by_size(one, "prefix_hit_token_ratio", 100.0, "prefix-hit tokens, %"),
            ),
        ]
        charts += [
            (f"Time to first token, {name}, against size", _by_size(one, field, 1.0, "s"))
            for name, field in (("p50", "ttft_p50_s"), ("p99", "ttft_p99_s"), ("p99.9", "ttft_p999_s"))
        ]
    if tiers:
        charts += _tier_charts(tiers)
    charts += [
        ("Time until a block is used again", _histogram(shape.gaps)),
        ("Asked for in between, share of the footprint (reuse distance)", _histogram(shape.distances)),
        ("Uses per block (sharing)", _histogram(shape.sharing)),
    ]
    return charts


def _by_size(outcomes: list[Outcome], field: str, scale: float, y_label: str) -> str:
    series = []
    for name in dict.fromkeys(outcome.policy for outcome in outcomes):
        rows = sorted((o for o in outcomes if o.policy == name), key=lambda o: o.fraction)
        values = [scale * float(getattr(row, field)) for row in rows]
        series.append(Series(name, [row.fraction for row in rows], values, dashed=name == OPTIMUM))
    return line_chart(series, x_label="share of the footprint", y_label=y_label, log_x=True, x_percent=True)


def _tier_charts(tiers: list[TierOutcome]) -> list[tuple[str, str]]:
    labels = [f"{outcome.policy}, {sizes_of(outcome)}" for outcome in tiers]
    names = list(dict.fromkeys(name for outcome in tiers for name in outcome.hit_token_ratio_by_tier))
    hits = [Series(n, [], [100 * o.hit_token_ratio_by_tier.get(n, 0.0) for o in tiers]) for n in names]
    times = [
        Series(name, [], [float(getattr(outcome, field)) for outcome in tiers])
        for name, field in (
            ("mean", "ttft_mean_s"),
            ("p50", "ttft_p50_s"),
            ("p99", "ttft_p99_s"),
            ("p99.9", "ttft_p999_s"),
        )
    ]
    charts = [
        ("Hit tokens by tier", bar_chart(labels, hits, y_label="% of input tokens", stacked=True)),
        ("Time to first token", bar_chart(labels, times, y_label="s")),
        (
            "Written to the SSD",
            bar_chart(labels, [Series("", [], [o.ssd_written_bytes / 1e9 for o in tiers])], y_label="GB"),
        ),
    ]
    for outcome, label in zip(tiers, labels, strict=True):
        width = max(outcome.links_busy_s, 1e-9) / TIME_BIN_COUNT
        hours = [i * width / 3600 for i in range(TIME_BIN_COUNT)]
        lines = [
            Series(name, hours, [size / width / 1e9 for size in moved])
            for name, moved in outcome.link_bytes_over_time.items()
        ]
        chart = line_chart(lines, x_label="hours", y_label="GB/s", log_x=False)
        charts.append((f"Moved over the links: {label}", chart))
    return charts


def _histogram(histogram: Histogram) -> str:
    return bar_chart(histogram.labels, [Series("blocks", [], histogram.counts)], y_label="blocks")


def _table(table: TextTable) -> str:
    if not table.rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in table.head)
    rows = ("".join(f"<td>{escape(text)}</td>" for text in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    title = f'<h3 class="table">{escape(table.title)}</h3>'
    return f'{title}<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
