"""Writers of a store, killed at every step: what was acknowledged is there, and nothing wrong is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefixd_server.app.fsck import LEFTOVERS, Check
from prefixd_server.app.offline_store import OfflineStore
from prefixd_server.base.failpoints import VARIABLE

ROUNDS = 6
BLOCKS = 8
WRITER = f"""
import asyncio, os, sys
from pathlib import Path
from prefixd_server.index.process import Index
from prefixd_server.index.records import NamespaceRecord, keys_of, seal, space_identity
from tests.support.specs import spec
from tests.support.stores import SLOT_BYTES, small_store, store_run

async def main():
    medium = small_store(Path(sys.argv[1]))
    index = Index(medium.index_directory, medium.store_uuid)
    await index.start()
    wanted = spec(block_bytes=SLOT_BYTES)
    name = NamespaceRecord("red", wanted.fingerprint(), 1, wanted, 0.0)
    await index.commit(namespaces=[name])
    identity = next(iter(name.spaces()))
    for number in range({ROUNDS}):
        # Each round reuses the segment of the round before the last.
        records = store_run(medium, {BLOCKS}, segment=number % 2, seed=number)
        records["space"] = memoryview(identity)
        seal(records)
        await index.commit(puts=records)
        os.write(1, b"put %d\\n" % number)
        if number % 3 == 2:
            await index.commit(deletes=keys_of(records)[::-1])
            os.write(1, b"deleted %d\\n" % number)
    await index.close()
    medium.close()

asyncio.run(main())
"""


def written(directory: Path, failpoints: str) -> list[str]:
    """Runs the writer until it ends or is killed; what it acknowledged, in order."""
    result = subprocess.run(
        [sys.executable, "-c", WRITER, directory],
        capture_output=True,
        check=False,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {VARIABLE: failpoints},
        timeout=100,
    )
    return [line for line in result.stdout.splitlines() if line.startswith(("put ", "deleted "))]


@pytest.mark.parametrize("reached", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        "nvme.written",
        "nvme.flushed",
        "nvme.generation_raised",
        "index.log_written",
        "index.log_synced",
        "none",
    ],
)
def test_a_kill_at_any_step_loses_only_what_was_not_acknowledged(
    tmp_path: Path, name: str, reached: int
) -> None:
    acknowledged = written(tmp_path / "store", f"{name}={reached}")
    assert (name == "none") == (acknowledged[-1:] == [f"deleted {ROUNDS - 1}"])
    with OfflineStore(tmp_path / "store") as store:
        verdict = Check(store).run()
    assert set(verdict.findings) <= LEFTOVERS
    assert verdict.problem_count == 0
    puts = [int(line.removeprefix("put ")) for line in acknowledged if line.startswith("put ")]
    if puts and puts[-1] % 3 != 2:
        # Neither deleted nor overwritten: the round after it writes to the other segment.
        assert verdict.good_count >= BLOCKS
