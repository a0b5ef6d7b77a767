"""The order of durability as the kernel sees it: data, its sync, the index's log, its sync, visible."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WRITER = """
import asyncio, os, sys
from pathlib import Path
from prefixd_server.index.process import Index
from tests.support.stores import small_store, store_run

async def main():
    medium = small_store(Path(sys.argv[1]))
    index = Index(medium.index_directory, medium.store_uuid)
    await index.start()
    os.write(1, b"BEGIN")
    await index.commit(puts=store_run(medium, 4))
    os.write(1, b"VISIBLE")
    await index.close()
    medium.close()

asyncio.run(main())
"""
CALLS = "openat,openat2,write,pwrite64,pwritev,pwritev2,writev,fsync,fdatasync,sync_file_range"


def steps(trace: str) -> list[str]:
    """What was written and synced between BEGIN and VISIBLE, in the kernel's order."""
    found: list[str] = []
    lines = iter(trace.splitlines())
    for line in lines:
        if '"BEGIN"' in line:
            break
    for line in lines:
        if '"VISIBLE"' in line:
            return [*found, "visible"]
        match = re.search(r"(\w+)\(\d+<([^>]*)>", line)
        if match is None:
            continue
        call, name = match.group(1), Path(match.group(2)).name
        kind = "sync" if "sync" in call else "write"
        if name.startswith("segment-"):
            found.append(f"{kind} data")
        elif re.fullmatch(r"\d+\.log", name):
            found.append(f"{kind} log")
    raise AssertionError("the writer never got to VISIBLE")


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_data_is_synced_before_the_index_says_so_and_the_index_before_it_is_visible(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    subprocess.run(
        [
            *("strace", "-f", "-y", "-qq", "-e", f"trace={CALLS}", "-o", trace),
            *(sys.executable, "-c", WRITER, tmp_path / "store"),
        ],
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=100,
    )
    assert steps(trace.read_text()) == [
        "write data",  # the header of the raised generation
        "sync data",
        "write data",
        "sync data",
        "write log",
        "sync log",
        "visible",
    ]
