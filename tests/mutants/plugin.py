"""A pytest plugin: imports one module with the mutant that PREFIXD_MUTANT names. Files stay as they are."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from tests.mutants.sites import TARGETS, Site, mutated
from tests.support.repository import ROOT


class _Loader(importlib.abc.Loader):
    def __init__(self, site: Site) -> None:
        self._site = site

    def exec_module(self, module: ModuleType) -> None:
        path = str(ROOT / TARGETS[self._site.module])
        exec(compile(mutated(self._site), path, "exec"), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, site: Site) -> None:
        self._site = site

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._site.module:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(self._site))


def pytest_configure() -> None:
    """Before anything of ours is imported."""
    site = os.environ.get("PREFIXD_MUTANT")
    if site:
        chosen = Site.parse(site)
        assert chosen.module not in sys.modules, f"{chosen.module} was imported before its mutant"
        sys.meta_path.insert(0, _Finder(chosen))
