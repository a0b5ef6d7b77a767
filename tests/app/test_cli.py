"""app/cli.py, without a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from prefixd_server.app.cli import main
from prefixd_server.app.exits import Exit
from prefixd_server.base.config_sample import sample_toml
from prefixd_server.base.config_sources import OWN_FLAGS, flag_of


def test_help_names_every_verb() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    for verb in (
        "serve",
        "config",
        "stats",
        "leases",
        "describe",
        "namespaces",
        "evict",
        "pin",
        "unpin",
        "drop-namespace",
    ):
        assert f"  {verb} " in text
    for verb in ("check", "drain", "mode", "explain", "record", "completion"):
        assert f"  {verb} " in text


def test_every_flag_that_errors_speak_of_exists() -> None:
    text = CliRunner().invoke(main, ["serve", "--help"]).output
    for key in OWN_FLAGS:
        assert flag_of(key) in text


def test_the_sample_is_printed() -> None:
    assert CliRunner().invoke(main, ["config", "sample"]).output == sample_toml()


def test_show_prints_the_configuration_in_force(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text("[dram]\nsize = '1GiB'\n")
    arguments = [
        "config",
        "show",
        "--config",
        str(file),
        "--socket",
        "/run/x.sock",
        "--set",
        "leases.ttl_max_s=60",
    ]
    shown = CliRunner(env={"PREFIXD_LOG_LEVEL": "debug"}).invoke(main, arguments).output
    assert 'size = "1GiB"' in shown
    assert "ttl_max_s = 60.0" in shown
    assert 'level = "debug"' in shown


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["config", "check", "--dram-size", "much"], "dram.size"),
        (["config", "check", "--set", "nonsense"], "KEY=VALUE"),
        (["serve", "--socket", "/run/x.sock", "--listen", "0.0.0.0:1"], "loopback"),
        (["config", "check", "--config", "/nonexistent"], "cannot be read"),
        (["describe", "--namespace", "ab", "xyz", "--socket", "/nonexistent"], "hex"),
    ],
)
def test_a_usage_error_exits_with_2_and_says_why(arguments: list[str], hint: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == Exit.USAGE
    assert hint in result.output


def test_no_daemon_is_an_exit_status_of_its_own() -> None:
    result = CliRunner().invoke(main, ["stats", "--socket", "/nonexistent/p.sock"])
    assert result.exit_code == Exit.UNREACHABLE
    assert "prefixd serve" in result.output


def test_a_good_configuration_is_called_fine() -> None:
    result = CliRunner().invoke(main, ["config", "check", "--socket", "/run/x.sock"])
    assert result.exit_code == Exit.OK
    assert "32 segments" in result.output


def test_the_configuration_is_json_for_scripts() -> None:
    shown = CliRunner().invoke(main, ["config", "show", "--socket", "/run/x.sock", "--json"])
    assert json.loads(shown.output)["dram"]["size"] == "512MiB"
    checked = CliRunner().invoke(main, ["config", "check", "--socket", "/run/x.sock", "--json"])
    assert json.loads(checked.output) == {"fine": True, "segment_count": 32, "tenants": ["default"]}
    wrong = CliRunner().invoke(main, ["config", "check", "--dram-size", "much", "--json"])
    told = json.loads(wrong.output)
    assert wrong.exit_code == Exit.USAGE
    assert (told["fine"], told["reason"], told["key"]) == (False, "CONFIG_INVALID", "dram.size")
