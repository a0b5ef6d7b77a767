"""How much memory this process may still take, so that too much is an error and not the OOM killer.

The kernel lets fallocate() of a memfd run until it must kill somebody; so the
question is asked first.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_OF_SELF = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")


def available_bytes() -> int | None:
    """The least of what the machine has available and what each cgroup above us leaves; None: not told."""
    limits = [_machine_bytes(), *_cgroup_bytes()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def free_huge_page_bytes() -> int:
    """Bytes in huge pages of the default size that are set aside and free."""
    sizes = _fields(_MEMINFO)
    page_bytes = sizes.get("Hugepagesize", 0)
    counted = _HUGE_PAGES / f"hugepages-{page_bytes // 1024}kB" / "free_hugepages"
    return page_bytes * (_number(counted) or 0)


def _machine_bytes() -> int | None:
    return _fields(_MEMINFO).get("MemAvailable")


def _cgroup_bytes() -> list[int]:
    """What the memory limits of our cgroups (version 2), up to the root, leave."""
    try:
        lines = _CGROUP_OF_SELF.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    here = _CGROUP_ROOT / own.strip("/")
    left: list[int] = []
    for folder in (here, *here.parents):
        if not folder.is_relative_to(_CGROUP_ROOT):
            break
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            left.append(max(0, limit - used + _page_cache_bytes(folder)))
    return left


def _page_cache_bytes(folder: Path) -> int:
    """Pages of files in a cgroup's use, which the kernel gives up first. Shared memory is not among them."""
    fields = _fields(folder / "memory.stat")
    return fields.get("inactive_file", 0) + fields.get("active_file", 0)


def _number(path: Path) -> int | None:
    """The number in a file; None when there is no file, or "max" in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Fields of /proc/meminfo or a memory.stat, in bytes; an empty dict when it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, *words = line.replace(":", " ").split() or [""]
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found
