"""app/completion.py: a shell that sources the script completes verbs and flags."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from click.testing import CliRunner
from prefixd_server.app.cli import main
from prefixd_server.app.completion import SHELLS
from prefixd_server.app.exits import Exit

from tests.support.daemon import PREFIXD


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_for_each_shell(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == Exit.OK
    assert "_PREFIXD_COMPLETE" in result.output


def test_an_unknown_shell_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["completion", "tcsh"]).exit_code == Exit.USAGE


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [(["prefixd", "dr"], ["drain", "drop-namespace"]), (["prefixd", "config", "sh"], ["show"])],
)
def test_bash_offers_what_fits(typed: list[str], offered: list[str]) -> None:
    words = " ".join(typed)
    program = f"""
source <(prefixd completion bash)
COMP_WORDS=({words}) COMP_CWORD={len(typed) - 1}
_prefixd_completion prefixd
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environment = {**os.environ, "PATH": f"{PREFIXD.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == offered
