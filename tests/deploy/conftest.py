"""The chart, rendered once for each set of values."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT
from tests.support.tools import tool

CHART = ROOT / "deploy/chart"
Render = Callable[..., list[dict[str, Any]]]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """helm, to its end, in the chart's folder."""
    return subprocess.run(
        [tool("helm"), *arguments], cwd=CHART, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(scope="session")
def render() -> Render:
    """render("gpu", "a.b=1"): the manifests of values-gpu.yaml with a.b set to 1; "" is the defaults.

    files: values that are what stands in a file.
    """

    def manifests(
        values: str, *settings: str, files: Mapping[str, Path] | None = None
    ) -> list[dict[str, Any]]:
        chosen = [f"--values=values-{values}.yaml"] if values else []
        changes = [f"--set={setting}" for setting in settings]
        changes += [f"--set-file={name}={path}" for name, path in (files or {}).items()]
        done = helm("template", "test", ".", "--namespace", "caches", *chosen, *changes)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return manifests
