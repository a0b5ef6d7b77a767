"""The documents stay true: links lead somewhere, named files exist, nothing is unlisted."""

from __future__ import annotations

import re

import pytest

from tests.support.repository import ROOT, named

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
FILE = re.compile(r"`((?:server|client|proto|tests|bench|deploy|docs)/[\w./-]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_link_leads_to_a_file(document) -> None:
    targets = LINK.findall(document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_file_that_is_named_exists(document) -> None:
    assert [name for name in FILE.findall(document.read_text()) if not (ROOT / name).exists()] == []


def test_the_readme_lists_every_document() -> None:
    listed = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - listed == set()
