"""docs/grpcurl.md, run as it stands: the real grpcurl against a real daemon."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import PREFIXD, DaemonProcess
from tests.support.wire import short_directory

PAGE = Path(__file__).parents[2] / "docs" / "grpcurl.md"
_FENCE = re.compile(r"^```(sh|output)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = "-- next command --"


def blocks() -> list[tuple[str, str | None]]:
    """(commands, output shown or None) of the page, in order."""
    found: list[tuple[str, str | None]] = []
    for kind, text in _FENCE.findall(PAGE.read_text()):
        if kind == "sh":
            found.append((text, None))
        else:
            found[-1] = (found[-1][0], text)
    return found


def pattern_of(shown: str) -> str:
    """An output as shown, as a regular expression: `...` alone is any lines, inside a line any text."""
    lines = [
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in shown.splitlines()
    ]
    return "".join(lines).rstrip("\n") + r"\s*"


@pytest.fixture(scope="module")
def outputs() -> Iterator[list[str]]:
    """What each block of the page printed, in one shell."""
    script = f"\necho '{_MARK}'\n".join(commands for commands, _ in blocks())
    with short_directory() as directory, DaemonProcess(directory / "p.sock") as daemon:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env={"PATH": f"{PREFIXD.parent}:{os.environ['PATH']}", "SOCKET": str(daemon.socket)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        yield done.stdout.split(f"{_MARK}\n")


@pytest.mark.parametrize("index", range(len(blocks())))
def test_every_command_prints_what_the_page_shows(outputs: list[str], index: int) -> None:
    _, shown = blocks()[index]
    assert re.fullmatch(pattern_of(shown or ""), outputs[index]), outputs[index]


@pytest.mark.parametrize(
    "needed",
    [
        "list",
        "describe",
        "Health/Check",
        "OpenNamespace",
        "Put",
        "Lookup",
        "Get",
        "GetStats",
        "DescribeBlock",
    ],
)
def test_the_page_shows_every_call_that_scripts_need(needed: str) -> None:
    assert any(re.search(rf"\b{re.escape(needed)}\b", commands) for commands, _ in blocks())
