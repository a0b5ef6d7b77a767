"""docs/errors.md lists every reason that the code can give, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import prefixd_server
from prefixd_server.base import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
SOURCES = sorted(Path(prefixd_server.__file__).parent.rglob("*.py"))
CLASSES = "|".join(
    [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    + ["AlreadyRunning", "TakeoverRefused", "packets.refusal"]
)
_RAISED = re.compile(rf'\b(?:{CLASSES})\(\s*"([A-Z][A-Z_]+)"')
_LISTED = re.compile(r"`([A-Z]+(?:_[A-Z]+)+|INTERNAL|DRAINING)`")


def raised() -> set[str]:
    """Reasons in the source."""
    return {reason for path in SOURCES for reason in _RAISED.findall(path.read_text())}


def test_every_reason_is_explained() -> None:
    missing = raised() - set(_LISTED.findall(PAGE.read_text()))
    assert not missing, f"docs/errors.md does not explain {sorted(missing)}"


def test_no_reason_is_explained_that_is_never_given() -> None:
    stale = set(_LISTED.findall(PAGE.read_text())) - raised()
    assert not stale, f"docs/errors.md explains {sorted(stale)}, which nothing raises"
