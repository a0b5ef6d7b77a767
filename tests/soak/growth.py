"""What a process holds on to, measured from the kernel's side, and whether it has grown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY_SLACK_BYTES = 6 << 20
MEMORY_SLACK_SHARE = 0.04
"""How much more memory may be in use: allocators keep what they have had, and give it out in other places."""
THREAD_SLACK = 2
"""gRPC starts and ends threads of its own as it likes."""
INDEX_FILE_COUNT_MAX = 64
"""Files of the index: logs and tables, which come and go."""


@dataclass(frozen=True)
class Holdings:
    """Of one daemon at rest. `memory_bytes` is its own memory; `files` are those outside the index."""

    memory_bytes: int
    threads: int
    descriptors: int
    children: int
    files: int
    index_files: int


def memory_bytes(pid: int) -> int:
    """Resident memory that is the process's own: without blocks, which are shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this kernel does not tell RssAnon")


def holdings(pid: int, *directories: Path) -> Holdings:
    """What a process holds now, and how many files there are below the directories."""
    files = [path for directory in directories for path in directory.rglob("*") if not path.is_dir()]
    index_files = sum("index" in path.parts for path in files)
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return Holdings(
        memory_bytes=memory_bytes(pid),
        threads=len(tasks),
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        children=sum(len((task / "children").read_text().split()) for task in tasks),
        files=len(files) - index_files,
        index_files=index_files,
    )


def grown(before: Holdings, after: Holdings) -> list[str]:
    """What there is more of, in words; nothing when nothing has grown."""
    limits = {
        "threads": before.threads + THREAD_SLACK,
        "descriptors": before.descriptors,
        "children": before.children,
        "files": before.files,
        "index_files": INDEX_FILE_COUNT_MAX,
    }
    return [
        f"{getattr(after, name)} {name.replace('_', ' ')}, {getattr(before, name)} before"
        for name, limit in limits.items()
        if getattr(after, name) > limit
    ]


def memory_grown(samples: Sequence[int]) -> list[str]:
    """Whether memory goes on growing: the last quarter of the samples against the second, by medians."""
    quarter = len(samples) // 4
    if not quarter:
        return [f"{len(samples)} samples of memory are too few"]
    early = statistics.median(samples[quarter : 2 * quarter])
    late = statistics.median(samples[-quarter:])
    if late - early <= MEMORY_SLACK_BYTES + MEMORY_SLACK_SHARE * early:
        return []
    return [f"memory has grown from {early / 1e6:.1f} to {late / 1e6:.1f} MB"]
