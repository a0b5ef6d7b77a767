"""docs/deploy.md tells of every verb and of the files that are there."""

from __future__ import annotations

import re

import click
from prefixd_server.app.cli import main
from prefixd_server.app.exits import Exit

from tests.support.repository import ROOT

PAGE = (ROOT / "docs/deploy.md").read_text()


def test_every_verb_is_in_the_table() -> None:
    context = click.Context(main)
    verbs = set(main.list_commands(context)) - {"serve", "config", "completion", "inspect"}
    told = set(re.findall(r"`([a-z-]+)`", "\n".join(re.findall(r"^\| (`.+?) \|", PAGE, re.MULTILINE))))
    assert verbs - told == set()


def test_every_verb_that_asks_a_daemon_or_shows_something_has_json() -> None:
    context = click.Context(main)
    without = []
    for name in set(main.list_commands(context)) - {"serve", "config", "completion", "simulate", "record"}:
        command = main.get_command(context, name)
        assert command is not None
        if not any("--json" in parameter.opts for parameter in command.params):
            without.append(name)
    assert without == []


def test_every_exit_status_is_told() -> None:
    told = {int(number) for number in re.findall(r"(?:: |; )(\d) [a-z]", PAGE.partition("Exit statuses")[2])}
    assert told == set(Exit)


def test_the_commands_install_files_that_exist() -> None:
    sources = re.findall(r"install -D -m 644 (\S+)", PAGE)
    assert len(sources) == 4
    assert [source for source in sources if not (ROOT / source).exists()] == []
