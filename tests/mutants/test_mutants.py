"""The sabotage finds its places, changes what it says, and nothing of what changed last survives it."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.__main__ import changed_modules, survivors
from tests.mutants.sites import TARGETS, mutated, sites
from tests.support import fake_cuda
from tests.support.repository import ROOT

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


@pytest.mark.parametrize("module", TARGETS)
def test_every_mutant_differs_from_the_code_and_from_the_others(module: str) -> None:
    found = sites(module)
    texts = {ast.unparse(mutated(site)) for site in found}
    assert len(texts) == len(found)
    assert ast.unparse(mutated(found[0])) != ast.unparse(ast.parse((ROOT / TARGETS[module]).read_text()))


def test_waits_closes_and_checks_are_all_found() -> None:
    kinds = Counter(site.kind for module in TARGETS for site in sites(module))
    assert set(kinds) == {"wait", "close", "check"}
    assert min(kinds.values()) >= 5


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not fake_cuda.has_compiler(), reason="the stand-in driver needs gcc to be built")
def test_no_mutant_of_what_changed_last_survives() -> None:
    assert survivors(changed_modules()) == []
