"""The client lives in the engine's environment: it brings what it needs and moves nothing that is there."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.daemon_command import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints-engines.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
BROUGHT_ALONG = {"xxhash"}
"""What the client needs and the engine does not have."""


@pytest.mark.parametrize("line", PROJECT["dependencies"])
def test_the_engines_own_version_of_what_the_client_needs_will_do(line) -> None:
    requirement = Requirement(line)
    assert version(requirement.name) in requirement.specifier


def test_what_is_installed_is_what_is_pinned() -> None:
    differ = {}
    for name, pinned in PINS.items():
        try:
            found = version(name).partition("+")[0]
        except PackageNotFoundError:
            found = "nothing"
        if found != pinned.strip().partition("+")[0]:
            differ[name] = (found, pinned)
    assert differ == {}


def test_the_client_brings_one_package() -> None:
    needed = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    from_engine = {canonicalize_name(name) for name in PINS} - BROUGHT_ALONG
    assert needed - from_engine == BROUGHT_ALONG


def test_the_connector_needs_nothing_of_the_daemon() -> None:
    code = (
        "import sys; from prefixd_client.connectors.vllm import PrefixdConnector; "
        "print([name for name in sys.modules if name.startswith('prefixd_server')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_installing_the_client_beside_the_engine_changes_nothing() -> None:
    """pip, asked for what the client needs and kept from any index, finds all of it there."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-"]
    done = subprocess.run(
        [*command, *PROJECT["dependencies"]], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout)["install"] == []
