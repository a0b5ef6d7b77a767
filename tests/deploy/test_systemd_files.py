"""deploy/systemd: what systemd's own checkers say of it, and that it agrees with the daemon."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prefixd_server.app.exits import Exit
from prefixd_server.base.config import Config
from prefixd_server.base.config_sources import load_config

from tests.support.repository import ROOT

UNITS = ROOT / "deploy/systemd"
EXPOSURE_MAX = 20
"""Tenths: 2.0 is "OK", the best word but one; the network is needed, users of other tenants too."""

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed (Debian: systemd)"
)


def unit() -> dict[str, list[str]]:
    """The service's settings by name."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / "prefixd.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A checker, to its end."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@needs_analyze
@pytest.mark.parametrize("drop_in", [None, "gpu.conf"])
def test_systemd_analyze_finds_nothing_wrong(tmp_path: Path, drop_in: str | None) -> None:
    # The command is not installed where tests run; any that is there stands for it.
    text = (UNITS / "prefixd.service").read_text().replace("/opt/prefixd/bin/prefixd", sys.executable)
    (tmp_path / "prefixd.service").write_text(text)
    if drop_in is not None:
        (tmp_path / "prefixd.service.d").mkdir()
        shutil.copy(UNITS / drop_in, tmp_path / "prefixd.service.d")
    checked = run("systemd-analyze", "verify", "--man=no", str(tmp_path / "prefixd.service"))
    ours = [line for line in checked.stderr.splitlines() if "prefixd" in line]
    assert (checked.returncode, ours) == (0, [])


@needs_analyze
def test_the_exposure_is_low(tmp_path: Path) -> None:
    checked = run(
        *("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}"),
        str(UNITS / "prefixd.service"),
    )
    assert checked.returncode == 0, checked.stdout[-200:]


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_the_user_and_the_directories_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    users = run("systemd-sysusers", f"--root={tmp_path}", str(UNITS / "sysusers.conf"))
    assert users.returncode == 0, users.stderr
    assert "prefixd" in (tmp_path / "etc/passwd").read_text()
    made = run(
        *("systemd-tmpfiles", f"--root={tmp_path}", "--create", "--exclude-prefix=/sys"),
        str(UNITS / "tmpfiles.conf"),
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "run/prefixd").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "var/lib/prefixd").stat().st_mode & 0o777 == 0o700


def test_the_packaged_configuration_is_right_and_stays_in_the_unit_s_directories() -> None:
    config = load_config(file=UNITS / "prefixd.toml")
    assert config.socket_path == Path("/run") / unit()["RuntimeDirectory"][0] / "prefixd.sock"
    assert config.server.data_dir == Path("/var/lib") / unit()["StateDirectory"][0]


def test_a_drain_fits_into_the_time_to_stop() -> None:
    assert Config().drain.timeout_s + 10 <= int(unit()["TimeoutStopSec"][0].removesuffix("s"))


def test_what_a_restart_cannot_help_is_not_tried_again() -> None:
    assert unit()["RestartPreventExitStatus"] == [f"{Exit.USAGE} {Exit.ALREADY_RUNNING}"]
