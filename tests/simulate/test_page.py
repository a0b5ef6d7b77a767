"""The page: complete, escaped, and self-contained."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from prefixd_server.simulate.advice import advise_one_tier
from prefixd_server.simulate.arrivals import ServingModel
from prefixd_server.simulate.optimum import optimal_hits
from prefixd_server.simulate.page import render_page
from prefixd_server.simulate.policies import TREE
from prefixd_server.simulate.replay import Replay
from prefixd_server.simulate.shape import shape_of
from prefixd_server.simulate.study import Outcome, capacity_of, judge
from prefixd_server.simulate.svg import Series, bar_chart, line_chart

from tests.support.requests import conversations

TRACE = conversations(8, 150)


class Reader(HTMLParser):
    """Collects tags and attributes, and whether tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in {"meta", "li"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag != "li":
            assert self.open.pop() == tag


def outcomes() -> list[Outcome]:
    made = []
    for policy in ("importance", "lru", "optimum"):
        for fraction in (0.05, 0.2):
            capacity = capacity_of(TRACE, fraction)
            if policy == "optimum":
                hits = optimal_hits(TRACE, capacity)
            else:
                hits = Replay(TRACE, TREE[policy](TRACE, capacity), capacity, seed=1).run()
            made.append(
                judge(
                    *(TRACE, hits, ServingModel()),
                    policy=policy,
                    fraction=fraction,
                    capacity=capacity,
                    spent_s=1.0,
                )
            )
    return made


@pytest.fixture(scope="module")
def page() -> str:
    """A page of one trace and one tier."""
    shape, rows = shape_of(TRACE), outcomes()
    advice = {TRACE.name: [*advise_one_tier(rows, shape, 131_072), "<b>5 & 6</b>"]}
    return render_page([shape], rows, [], advice, ["stated"])


def test_nothing_outside_the_page_is_asked_for(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "use", "image"} & set(reader.tags)
    assert not {"src", "href", "xlink:href", "data", "srcset", "action"} & {n for n, _ in reader.attributes}
    assert not re.search(r"url\(|@import|https?:|//[a-z]", page)


def test_every_tag_is_closed_in_order(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []


def test_every_part_that_is_promised_is_there(page: str) -> None:
    for words in (
        "Recommendation",
        "Run the policy",
        "Hit ratio against size",
        "Time to first token, p50",
        "Time to first token, p99.9",
        "Time until a block is used again",
        "reuse distance",
        "sharing",
        "Hottest shared prefixes",
        "stated",
    ):
        assert words in page
    assert page.count("<figure>") == 7
    assert "stroke-dasharray" in page


def test_what_others_wrote_is_escaped(page: str) -> None:
    assert "<b>5 & 6</b>" not in page
    assert "&lt;b&gt;5 &amp; 6&lt;/b&gt;" in page


def test_lines_end_where_their_values_are() -> None:
    chart = line_chart([Series("a", [1.0, 10.0], [0.0, 4.0])], x_label="x", y_label="y", log_x=True)
    (points,) = re.findall(r'points="([^"]+)"', chart)
    (x_low, y_low), (x_high, y_high) = (map(float, point.split(",")) for point in points.split())
    assert (x_low, y_low) == (60.0, 276.0)
    assert (x_high, y_high) == (624.0, 14.0)


def test_bars_are_as_high_as_their_values() -> None:
    chart = bar_chart(["one", "two"], [Series("a", [], [1.0, 2.0])], y_label="y")
    heights = [float(height) for height in re.findall(r'height="([0-9.]+)" fill', chart)]
    assert heights[1] == pytest.approx(2 * heights[0])


def test_charts_of_nothing_are_empty() -> None:
    assert line_chart([], x_label="x", y_label="y", log_x=False) == ""
    assert bar_chart([], [], y_label="y") == ""
