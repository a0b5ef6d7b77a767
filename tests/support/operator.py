"""The operator's command against a daemon, beside the loop of the test."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from prefixd_server.app.cli import main
from prefixd_server.app.exits import Exit


async def run_prefixd(socket: Path, *arguments: str, text: str | None = None) -> Result:
    """One call of the command, to its end."""
    return await asyncio.to_thread(
        CliRunner().invoke, main, [*arguments, "--socket", str(socket)], input=text
    )


async def prefixd_json(socket: Path, *arguments: str) -> Any:
    """The answer of a call that must succeed."""
    result = await run_prefixd(socket, *arguments, "--json")
    assert result.exit_code == Exit.OK, result.output
    return json.loads(result.output)
