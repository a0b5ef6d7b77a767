"""The client lives in SGLang's environment: it brings what it needs and moves nothing that is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.daemon_command import ROOT
from tests.support.sglang_process import STANDINS

NEEDED = [
    Requirement(line)
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints-engines-sglang.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def installed(name: str) -> str:
    """The version that is installed, without its build."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "nothing"


def test_what_is_installed_is_what_is_pinned() -> None:
    found = {name: installed(name) for name in PINS}
    assert found == PINS


def test_sglangs_own_version_of_what_the_client_needs_will_do() -> None:
    assert [str(needed) for needed in NEEDED if installed(needed.name) not in needed.specifier] == []


def test_the_client_limits_nothing_that_sglang_asks_for() -> None:
    """What both name, each with its limits, has a version that suits both: the pinned one."""
    asked = [Requirement(line) for line in requires("sglang") or [] if "extra ==" not in line]
    names = {canonicalize_name(needed.name) for needed in NEEDED}
    both = [one for one in asked if canonicalize_name(one.name) in names]
    assert {canonicalize_name(one.name) for one in both} >= {"numpy", "xxhash"}
    assert [str(one) for one in both if installed(one.name) not in one.specifier] == []


def test_installing_the_client_beside_sglang_changes_nothing() -> None:
    """pip, asked for what the client needs and kept from any index, finds all of it there."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-"]
    done = subprocess.run(
        [*command, *map(str, NEEDED)], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout)["install"] == []


def test_the_connector_needs_nothing_of_the_daemon() -> None:
    code = (
        "import sys; import prefixd_client.connectors.sglang; "
        "print([name for name in sys.modules if name.startswith('prefixd_server')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(STANDINS)},
        timeout=120,
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"
