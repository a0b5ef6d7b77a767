"""Small charts as inline SVG: lines over a logarithmic axis or time, and bars. No scripts, no requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 14, 64
TEXT_WIDTH = 6.2
"""Of one letter, about."""
COLOURS = ("#1f6feb", "#d1570a", "#2da44e", "#8250df", "#bf3989", "#9a6700", "#57606a", "#0a7d8c")


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one set of bars. A dashed line is a bound, not a policy."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False


def colour_of(place: int) -> str:
    """Colour of the series at that place."""
    return COLOURS[place % len(COLOURS)]


def line_chart(
    series: Sequence[Series], *, x_label: str, y_label: str, log_x: bool, x_percent: bool = False
) -> str:
    """Lines with a legend; y starts at zero."""
    drawn = [line for line in series if len(line.xs)]
    if not drawn:
        return ""
    x_low = min(min(line.xs) for line in drawn)
    x_high = max(max(line.xs) for line in drawn)
    y_high = _nice(max(max(line.ys) for line in drawn))

    def place(x: float, y: float) -> tuple[float, float]:
        if log_x:
            share = math.log(x / x_low) / math.log(x_high / x_low) if x_high > x_low else 0.5
        else:
            share = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / y_high * (HEIGHT - TOP - BOTTOM)

    parts = _frame(y_high, x_label, y_label)
    ticks = sorted({x for line in drawn for x in line.xs}) if log_x else _steps(x_low, x_high)
    for x in ticks:
        text = f"{100 * x:g}%" if x_percent else f"{x:.3g}"
        parts.append(
            f'<text x="{place(x, 0)[0]:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>'
        )
    for number, line in enumerate(drawn):
        points = [place(x, y) for x, y in zip(line.xs, line.ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        stroke = "currentColor" if line.dashed else colour_of(number)
        parts.append(f'<polyline fill="none" stroke="{stroke}" stroke-width="2"{dash} points="{path}"/>')
        if not line.dashed and log_x:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{stroke}"/>' for x, y in points]
    legend = [(line.name, "currentColor" if line.dashed else colour_of(n)) for n, line in enumerate(drawn)]
    return _svg(parts, y_label) + _legend(legend)


def bar_chart(labels: Sequence[str], series: Sequence[Series], *, y_label: str, stacked: bool = False) -> str:
    """Bars by label, side by side or stacked; `xs` of the series are not used."""
    if not labels:
        return ""
    totals = [sum(line.ys[i] for line in series) for i in range(len(labels))]
    y_high = _nice(max(totals) if stacked else max(max(line.ys) for line in series))
    parts = _frame(y_high, "", y_label)
    group = (WIDTH - LEFT - RIGHT) / len(labels)
    bar = group * 0.8 / (1 if stacked else len(series))
    flat = max(len(line) for label in labels for line in label.split(", ")) * TEXT_WIDTH <= group
    for i, label in enumerate(labels):
        x, base = LEFT + i * group + group * 0.1, float(HEIGHT - BOTTOM)
        for number, line in enumerate(series):
            height = line.ys[i] / y_high * (HEIGHT - TOP - BOTTOM)
            at = x if stacked else x + number * bar
            base = base if stacked else float(HEIGHT - BOTTOM)
            base -= height
            title = f"<title>{escape(line.name)}, {escape(label)}: {line.ys[i]:.4g}</title>"
            parts.append(
                f'<rect x="{at:.1f}" y="{base:.1f}" width="{bar:.1f}" height="{height:.1f}" '
                f'fill="{colour_of(number)}">{title}</rect>'
            )
        parts.append(_bar_label(LEFT + (i + 0.5) * group, label, flat=flat))
    legend = [(line.name, colour_of(number)) for number, line in enumerate(series)] if len(series) > 1 else []
    return _svg(parts, y_label) + _legend(legend)


def _bar_label(x: float, label: str, *, flat: bool) -> str:
    """Below its bar: flat, in lines broken at commas, or turned."""
    lines = label.split(", ")
    y = HEIGHT - BOTTOM + 14
    if flat:
        spans = "".join(
            f'<tspan x="{x:.1f}" dy="{13 * (i > 0)}">{escape(t)}</tspan>' for i, t in enumerate(lines)
        )
        return f'<text y="{y}" text-anchor="middle">{spans}</text>'
    turned = f'text-anchor="end" transform="rotate(-30 {x:.1f} {y})"'
    return f'<text x="{x:.1f}" y="{y}" {turned}>{escape(label)}</text>'


def _short(value: float) -> str:
    """1500000 as 1.5M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{suffix}"
    return f"{value:.4g}"


def _frame(y_high: float, x_label: str, y_label: str) -> list[str]:
    parts = []
    for step in range(6):
        y = HEIGHT - BOTTOM - step / 5 * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(y_high * step / 5)}</text>'
        )
    middle = (HEIGHT - BOTTOM + TOP) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 14 {middle})"'
    parts.append(f'<text x="14" y="{middle}" {turned}>{escape(y_label)}</text>')
    if x_label:
        parts.append(
            f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
        )
    return parts


def _svg(parts: list[str], title: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return head + "".join(parts) + "</svg>"


def _legend(entries: list[tuple[str, str]]) -> str:
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries
    )
    return f'<div class="legend">{items}</div>' if entries else ""


def _nice(value: float) -> float:
    """The next round number: of one digit, or 1.5 or 2.5, x a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9)
    )


def _steps(low: float, high: float) -> list[float]:
    """Round numbers from low to high, some seven."""
    step = _nice((high - low) / 7)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]
