"""Files are rooms and functions fit a screen."""

from __future__ import annotations

import ast

from tests.support.repository import CODE, PACKAGES, named, parsed, python_files

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70


def test_no_file_is_longer_than_a_room() -> None:
    lengths = {named(path): len(path.read_text().splitlines()) for path in python_files(*CODE)}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{named(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in python_files(*CODE)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    }
    assert long == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        named(path)
        for path in python_files(*CODE)
        if path.stat().st_size and not ast.get_docstring(parsed(path))
    ]
    assert silent == []


def test_every_public_name_of_the_packages_says_what_it_is() -> None:
    silent = [
        f"{named(path)}:{node.lineno} {node.name}"
        for path in python_files(*PACKAGES)
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []
