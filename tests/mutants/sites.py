"""Where the device code waits, checks and gives back, found in its syntax: each place is one mutant.

wait    a statement that waits, records an event to wait for, or loops until one is done: left out
close   a statement that gives something back: left out
check   a condition on a lease, a fault or an end, or one part of it: never true
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

TARGETS = {
    "prefixd_server.media.cuda": "server/prefixd_server/media/cuda.py",
    "prefixd_server.media.hbm": "server/prefixd_server/media/hbm.py",
    "prefixd_server.media.hbm_devices": "server/prefixd_server/media/hbm_devices.py",
    "prefixd_client.device": "client/prefixd_client/device.py",
    "prefixd_client.device_copy": "client/prefixd_client/device_copy.py",
    "prefixd_client.device_driver": "client/prefixd_client/device_driver.py",
    "prefixd_client.connectors.vllm.device_copies": "client/prefixd_client/connectors/vllm/device_copies.py",
}
"""Modules and their files."""

WAITS = {"_wait", "wait_for", "record", "follow", "cuEventRecord", "cuStreamWaitEvent", "clear"}
CLOSES = {
    "close",
    "free",
    "unpin",
    "end_stream",
    "end_event",
    "release",
    "cuMemFree",
    "cuEventDestroy",
    "cuStreamDestroy",
    "cuCtxPopCurrent",
    "cuDevicePrimaryCtxRelease",
    "cuIpcCloseMemHandle",
    "cuMemHostUnregister",
}
CHECKS = {"is_over", "fault", "is_closed", "_is_done", "is_done", "monotonic", "_pinned", "_gpu"}


@dataclass(frozen=True, slots=True)
class Site:
    """One mutant: where it is, what kind it is, and which part of a condition."""

    module: str
    line: int
    kind: str
    part: int = -1

    def __str__(self) -> str:
        return f"{self.module}:{self.line}:{self.kind}:{self.part}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """The inverse of str()."""
        module, line, kind, part = text.split(":")
        return cls(module, int(line), kind, int(part))

    @property
    def source(self) -> str:
        """The line, for people."""
        return Path(ROOT / TARGETS[self.module]).read_text().splitlines()[self.line - 1].strip()


def sites(module: str) -> list[Site]:
    """Every mutant of a module."""
    found = []
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = _called(node.value)
            if name == "clear" and not node.value.args:
                continue  # of a collection of ours
            if name in WAITS | CLOSES:
                found.append(Site(module, node.lineno, "wait" if name in WAITS else "close"))
        elif isinstance(node, ast.While) and _names(node.test) & CHECKS:
            found.append(Site(module, node.lineno, "wait"))
        elif isinstance(node, ast.If) and _names(node.test) & CHECKS:
            found += [Site(module, node.lineno, "check", part) for part in _parts(node.test)]
    return sorted(found, key=lambda site: (site.line, site.part))


def mutated(site: Site) -> ast.Module:
    """The module's syntax with the mutant in it."""
    tree = _tree(site.module)
    changed = ast.fix_missing_locations(_Mutation(site).visit(tree))
    assert isinstance(changed, ast.Module)
    return changed


class _Mutation(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._site = site

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self._left_out(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._left_out(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if (node.lineno, self._site.kind) == (self._site.line, "check"):
            never = ast.Constant(value=False)
            if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
                node.test.values[self._site.part] = never
            else:
                node.test = never
        return node

    def _left_out(self, node: ast.stmt) -> ast.AST:
        if node.lineno == self._site.line and self._site.kind in {"wait", "close"}:
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / TARGETS[module]).read_text())


def _parts(test: ast.expr) -> list[int]:
    """Operands of an `or` that check something; -1 for any other condition as a whole."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return [index for index, value in enumerate(test.values) if _names(value) & CHECKS]
    return [-1]


def _called(call: ast.Call) -> str:
    """The last name of what is called; of a driver call, the driver's name."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = call.args[0] if call.args else None
    if name in {"call", "_call"} and isinstance(first, ast.Constant):
        return str(first.value)
    return name


def _names(node: ast.AST) -> set[str]:
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Name):
            found.add(part.id)
    return found
