"""Code, docs/metrics.md, dashboard, alerts and runbook name the same metrics and the same alerts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefixd_server.base.accounts import Counters, Stats
from prefixd_server.base.metrics import Metrics, metrics_table
from prefixd_server.base.types import Tier

from tests.support.repository import ROOT
from tests.support.tools import tool

PAGE = ROOT / "docs/metrics.md"
RUNBOOK = ROOT / "docs/runbook.md"
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
DASHBOARD = ROOT / "deploy/grafana/prefixd.json"
NAME = re.compile(r"\bprefixd_[a-z_]+")
HISTOGRAM_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def served() -> set[str]:
    """Every metric that the daemon serves."""
    return set(re.findall(r"^\| `(prefixd_[a-z_]+)`", metrics_table(), re.MULTILINE))


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def named_in(text: str) -> set[str]:
    """Metrics that expressions name."""
    histograms = {name for name in served() if f"| `{name}` | histogram" in metrics_table()}
    found = set()
    for name in NAME.findall(text):
        base = HISTOGRAM_SUFFIX.sub("", name)
        found.add(base if base in histograms else name)
    return found


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels without its rows."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> str:
    """Every expression of the dashboard."""
    return "\n".join(target["expr"] for panel in panels() for target in panel["targets"])


def test_the_page_has_the_table_of_the_code() -> None:
    assert PAGE.read_text().endswith(metrics_table()), f"the table must be:\n{metrics_table()}"


def test_every_metric_is_in_the_dashboard_or_in_an_alert() -> None:
    alerts = "\n".join(rule["expr"] for rule in rules())
    assert served() - named_in(expressions()) - named_in(alerts) == set()


@pytest.mark.parametrize("source", [PAGE, RUNBOOK, ALERTS, DASHBOARD], ids=lambda path: path.name)
def test_nothing_names_a_metric_that_is_not_served(source: Path) -> None:
    assert named_in(source.read_text()) - served() == set()


@pytest.mark.parametrize("source", [ALERTS, DASHBOARD], ids=lambda path: path.name)
def test_selectors_name_labels_that_the_metric_has(source: Path) -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]+) \|", metrics_table(), re.MULTILINE))
    text = source.read_text().replace('\\"', '"')
    wrong = []
    for name, selector in re.findall(r"(prefixd_[a-z_]+)\{([^}]*)\}", text):
        base = name if name in table else HISTOGRAM_SUFFIX.sub("", name)
        has = set(table[base].split(", ")) | {"instance", "le"}
        wrong += [f"{name}: {label}" for label in re.findall(r"(\w+)[=!]", selector) if label not in has]
    assert wrong == []


def test_every_alert_has_its_remedy_and_every_remedy_its_alert() -> None:
    explained = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in rules()] == explained


def test_every_alert_says_what_to_do_about_whom() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_panels_neither_overlap_nor_share_an_id() -> None:
    every = json.loads(DASHBOARD.read_text())["panels"]
    places = [
        (x, y)
        for panel in every
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in every}) == len(every)


def test_promtool_accepts_the_rules_and_they_fire_when_they_should() -> None:
    promtool = tool("promtool")
    for command in (("check", "rules", ALERTS.name), ("test", "rules", "alerts_test.yaml")):
        done = subprocess.run(
            [promtool, *command], cwd=ALERTS.parent, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_names_and_units_as_prometheus_wants_them() -> None:
    metrics = Metrics()
    metrics.rpc_seconds("Lookup", "t").observe(0.1)
    metrics.crossed(Tier.DRAM, Tier.NVME, 0.1, 1)
    stats = Stats((), Counters(), 0, 0, 0, 0, False, 0.0)
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"],
        input=metrics.render(stats, {"t": stats}),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_promtool_accepts_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    promtool = tool("promtool")
    variables = {"$__rate_interval": "5m", "$instance": ".*", "$tenant": ".*"}
    groups = []
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            groups.append({"record": f"panel:x{panel['id']}_{target['refId']}", "expr": expression})
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": groups}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
