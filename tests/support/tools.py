"""Programs of others that check what is in deploy/: on the path, or where `make deploy-tools` puts them."""

from __future__ import annotations

import shutil

import pytest

from tests.support.repository import ROOT

TOOLS = ROOT / "build/tools"


def tool(name: str) -> str:
    """The program; skips the test, with the remedy, where it is not."""
    found = shutil.which(name, path=str(TOOLS)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `make deploy-tools` brings it where it can")
    return found
