"""docs/nvme.md explains every state and every kind of fault that the daemon tells."""

from __future__ import annotations

import re
from pathlib import Path

from prefixd_server.base.accounts import Fault
from prefixd_server.cache.nvme_health import NvmeState

PAGE = Path(__file__).parents[2] / "docs" / "nvme.md"


def explained(heading: str) -> list[str]:
    """The first column of the table below a heading."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_every_state_is_explained() -> None:
    assert sorted(explained("States")) == sorted(state.value for state in NvmeState)


def test_every_kind_of_fault_is_explained_in_the_order_it_is_told() -> None:
    assert explained("What is counted") == [fault.value for fault in Fault]
