"""The Makefile says what it can do, and asks of a machine only what it says."""

from __future__ import annotations

import re
import subprocess

from tests.support.repository import ROOT

TARGETS = {"demo", "test", "lint", "proto", "bench", "serve", "clean"}


def test_make_alone_lists_every_target_with_a_line_of_help() -> None:
    answer = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = dict(re.findall(r"^ +make (\w+) +(\S.*)$", answer.stdout, re.MULTILINE))
    assert listed.keys() >= TARGETS


def test_every_target_has_its_line_of_help_and_every_line_its_target() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("*.mk")))
    phony = {name for line in re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE) for name in line.split()}
    assert phony == set(re.findall(r"^([a-z-]+):.*## \S", text, re.MULTILINE))
    assert phony >= TARGETS


def test_a_python_without_environments_gets_the_remedy(tmp_path) -> None:
    bare = tmp_path / "python3"
    bare.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n')
    bare.chmod(0o755)
    answer = subprocess.run(
        ["make", "proto", f"PYTHON={bare}", f"VENV={tmp_path}/environment"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode != 0
    assert "apt-get install python3-venv" in answer.stderr
