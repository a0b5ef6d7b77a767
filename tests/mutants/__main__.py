"""Removes each wait, check and close of the device code in turn, and fails when no test notices.

python -m tests.mutants [--changed] [MODULE ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.mutants.sites import TARGETS, Site, sites
from tests.support.repository import ROOT

TESTS = {
    "prefixd_server": [
        "tests/gpu/test_hbm.py",
        "tests/gpu/test_hbm_devices.py",
        "tests/gpu/test_tier_faults.py",
    ],
    "prefixd_client": ["tests/gpu/test_device.py", "tests/gpu/test_vllm_copies.py"],
}
"""What is to notice, the quickest first, by the module's root."""
SIDE_BY_SIDE = 2
"""Few, so that none hangs for want of a core."""
TIMEOUT_S = 120.0
"""A mutant that hangs is noticed too."""


def is_noticed(module: str, site: Site | None) -> bool:
    """Whether a test fails, or does not end, with a mutant in the module; or without one."""
    tests = TESTS[module.partition(".")[0]]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--timeout",
        "20",
        "-p",
        "tests.mutants.plugin",
        *tests,
    ]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PREFIXD_MUTANT": str(site or "")},
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return True
    assert "no tests ran" not in done.stdout, done.stdout
    return done.returncode != 0


def changed_modules() -> list[str]:
    """Modules that the last commit or the working tree has changed."""
    names = subprocess.run(
        ["git", "diff", "--name-only", "HEAD~1"], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout.split()
    return [module for module, path in TARGETS.items() if path in names]


def survivors(modules: list[str]) -> list[Site]:
    """Mutants that no test notices."""
    left = []
    threads = ThreadPoolExecutor(SIDE_BY_SIDE)
    for module in modules:
        if is_noticed(module, None):
            raise RuntimeError(
                f"the tests of {module} fail without a mutant: nothing could be told from them"
            )
        found = sites(module)
        for site, noticed in zip(found, threads.map(partial(is_noticed, module), found), strict=True):
            print(f"{'noticed ' if noticed else 'SURVIVED'}  {site}  {site.source}", flush=True)
            if not noticed:
                left.append(site)
    return left


def main() -> int:
    """The number of survivors decides the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changed", action="store_true", help="modules changed in the last commit or since")
    parser.add_argument("modules", nargs="*", default=[])
    chosen = parser.parse_args()
    modules = changed_modules() if chosen.changed else chosen.modules or list(TARGETS)
    left = survivors(modules)
    print(f"{sum(len(sites(module)) for module in modules)} mutants, {len(left)} survived")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
