"""What belongs to the repository: its root and its own files."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("server", "client")
CODE = (*PACKAGES, "proto", "tests", "bench")
GENERATED = ("_pb2.py", "_pb2_grpc.py")


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """Python files that people wrote, below folders of the root."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(sorted(path for path in found if not path.name.endswith(GENERATED)))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def named(path: Path) -> str:
    """A path as people say it, from the root."""
    return str(path.relative_to(ROOT))
