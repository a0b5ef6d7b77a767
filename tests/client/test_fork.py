"""After os.fork() the child is told what to do, and the parent goes on."""

from __future__ import annotations

import subprocess
import sys

from tests.support.repository import ROOT

SCRIPT = """
import os, sys
from pathlib import Path
from prefixd_client import Client, ForkedError
from tests.support.clients import PATIENT, empty, run_of, spec, stored
from tests.support.fake_daemon import fake_daemon

path, run = Path(sys.argv[1]), run_of(2)
with fake_daemon(path) as daemon, Client(path, options=PATIENT) as client:
    namespace = client.namespace(spec())
    stored(namespace, run)
    lease = namespace.acquire(run)
    child = os.fork()
    if child == 0:
        calls = [
            lambda: client.namespace(spec()),
            lambda: namespace.lookup(run),
            lambda: namespace.acquire(run),
            lambda: namespace.reserve(run),
            lambda: namespace.put([]),
            lambda: namespace.get(run),
            lambda: lease.load(empty(2)),
        ]
        told = 0
        for call in calls:
            try:
                call()
            except ForkedError as error:
                told += "in the child after the fork" in str(error)
        lease.release()
        client.close()
        os._exit(0 if told == len(calls) else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child was not told"
    assert lease.load(empty(2)) == 2
    assert namespace.lookup(run).hit_count == 2
"""


def test_a_forked_child_is_told_and_its_parent_goes_on(path) -> None:
    warnings = ["-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *warnings, "-c", SCRIPT, path],
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
