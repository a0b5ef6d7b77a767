"""The words of docs/terms.md are the words of the code, and nothing is left unfinished or silenced."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.repository import CODE, PACKAGES, ROOT, named, parsed, python_files

# Written in two parts, so that this file does not hold what it looks for.
UNFINISHED = re.compile(
    "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error", "for" + " now,"))
)
SILENCED = re.compile(r"#\s*(type:\s*ignore|noqa)\b")
WITH_REASON = re.compile(
    r"#\s*(type:\s*ignore\[[\w, -]+\]|noqa:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)\s*[-#]+\s*\S+ \S+"
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|farm|home)/\w")


def not_our_words() -> list[str]:
    """The words that docs/terms.md keeps out of the code's names."""
    line = re.search(r"^Never in a name: (.+)\.$", (ROOT / "docs/terms.md").read_text(), re.MULTILINE)
    assert line, "docs/terms.md lost its line 'Never in a name: ...'"
    return [word.strip() for word in line.group(1).split(",")]


def names_of(tree: ast.Module) -> set[str]:
    """Every name that a module gives to something: classes, functions, arguments, variables."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def words_of(name: str) -> set[str]:
    """ "PageTable" and "page_table" both hold the words page and table."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def test_names_use_the_words_of_the_terms() -> None:
    avoided = set(not_our_words())
    wrong = [
        f"{named(path)}: {name}"
        for path in python_files(*PACKAGES)
        for name in sorted(names_of(parsed(path)))
        if words_of(name) & avoided
    ]
    assert wrong == []


@pytest.mark.parametrize("suffix", ["*.py", "*.proto"])
def test_nothing_is_left_unfinished(suffix: str) -> None:
    files = [path for folder in CODE for path in (ROOT / folder).rglob(suffix) if "_pb2" not in path.name]
    assert files
    left = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert left == []


def test_a_silenced_check_names_itself_and_gives_its_reason_on_the_line() -> None:
    silent = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in python_files(*CODE)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SILENCED.search(line) and not WITH_REASON.search(line)
    ]
    assert silent == []


def test_no_path_of_a_machine_is_written_down() -> None:
    files = [*python_files(*CODE), *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "Makefile"]
    found = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
