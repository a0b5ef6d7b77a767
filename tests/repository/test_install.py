"""Pins are complete, and the client asks of an engine's environment only what it says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED_EXTRAS = ("server", "transformers", "dev")
NOT_IN_AN_ENGINE = (
    "torch",
    "transformers",
    "structlog",
    "uvloop",
    "click",
    "rich",
    "prometheus_client",
    "rocksdbpy",
)


def pins() -> dict[str, str]:
    """Version of each pinned package."""
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def required(*extras: str) -> list[Requirement]:
    """The base install's requirements and those of extras."""
    optional = PROJECT["optional-dependencies"]
    return [
        Requirement(text) for text in [*PROJECT["dependencies"], *(r for e in extras for r in optional[e])]
    ]


@pytest.mark.parametrize("requirement", required(*INSTALLED_EXTRAS), ids=str)
def test_every_dependency_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_every_dependency_has_its_reason() -> None:
    reasons = (ROOT / "docs/dependencies.md").read_text()
    names = {requirement.name for requirement in required(*PROJECT["optional-dependencies"])}
    assert {name for name in names if f"`{name}`" not in reasons} == set()


def test_the_client_imports_without_the_daemon_s_packages_and_without_an_engine() -> None:
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {NOT_IN_AN_ENGINE!r} or name.startswith("prefixd_server"):
            raise ImportError("not in an engine's environment: " + name)
sys.meta_path.insert(0, Refuse())
import prefixd_client
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_generated_code_imports_under_the_oldest_protobuf_that_an_engine_carries() -> None:
    generated = sorted((ROOT / "proto/prefixd/v1").glob("*_pb2.py"))
    assert generated
    for path in generated:
        version = re.search(r"^# Protobuf Python Version: (\d+)\.(\d+)", path.read_text(), re.MULTILINE)
        assert version, path.name
        assert (int(version.group(1)), int(version.group(2))) <= (6, 33), path.name
