"""What a process holds on to, measured from the kernel's side, and whether it has grown."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY_SLACK_BYTES = 6 << 20
MEMORY_SLACK_SHARE = 0.04
"""How much more memory may be in use: allocators keep what they have had, and give it out in other places."""
THREAD_SLACK = 2
"""gRPC starts and ends threads of its own as it likes."""
INDEX_FILE_COUNT_MAX = 64
"""Files of the index: logs and tables, which come and go."""


AT_REST_S, LOOK_INTERVAL_S = 2.0, 0.1
"""Who asks a daemon how it is opens connections; the least seen in so long is what it keeps."""


@dataclass(frozen=True)
class Holdings:
    """Of one daemon at rest. `memory_bytes` is its own memory; `files` are those outside the index.

    kinds: of its descriptors, for people.
    """

    memory_bytes: int
    threads: int
    descriptors: int
    children: int
    files: int
    index_files: int
    kinds: str


def memory_bytes(pid: int) -> int:
    """Resident memory that is the process's own: without blocks, which are shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this kernel does not tell RssAnon")


def at_rest(pid: int, directory: Path) -> Holdings:
    """What a process keeps holding when nobody is there: the look with the fewest descriptors and threads."""
    looks = []
    until = time.monotonic() + AT_REST_S
    while time.monotonic() < until:
        looks.append(holdings(pid, directory))
        time.sleep(LOOK_INTERVAL_S)  # what ends by itself has time to
    return min(looks, key=lambda look: (look.descriptors, look.threads))


def holdings(pid: int, directory: Path) -> Holdings:
    """What a process holds now, and how many files there are below the directory."""
    files = [path for path in directory.rglob("*") if not path.is_dir()]
    index_files = sum("index" in path.parts for path in files)
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    kinds = Counter(re.sub(r"\d+", "N", name) for name in descriptors(pid))
    return Holdings(
        memory_bytes=memory_bytes(pid),
        threads=len(tasks),
        descriptors=kinds.total(),
        children=sum(len((task / "children").read_text().split()) for task in tasks),
        files=len(files) - index_files,
        index_files=index_files,
        kinds=", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
    )


def descriptors(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return found


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
