"""What must hold before DRAM is taken: nodes that exist, memory that is there, open files enough.

Each check raises the ConfigError that the daemon ends with, with the remedy.
"""

from __future__ import annotations

import resource

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.sizes import format_size
from prefixd_server.media import memory_limit, numa

DESCRIPTORS_PER_SEGMENT = 2
"""The memfd, and the one that Python's mmap keeps of its own."""
DESCRIPTORS_AT_LEAST = 512
"""Sockets, files and pidfds of the rest of the daemon, when there are few engines."""
DESCRIPTORS_WISHED = 16_384
"""The same with thousands of sessions, three descriptors each."""


def refuse_unknown_nodes(nodes: tuple[int, ...]) -> None:
    """Raises ConfigError NUMA_NODE_UNKNOWN."""
    online = numa.online_nodes()
    for node in nodes:
        if node not in online:
            raise ConfigError(
                "NUMA_NODE_UNKNOWN",
                f"dram.numa_nodes names node {node}; choose among {', '.join(map(str, online))}",
                key="dram.numa_nodes",
                value=node,
            )


def refuse_too_much(wanted_bytes: int, hugetlb: bool) -> None:
    """Raises ConfigError DRAM_UNAVAILABLE; taking more than there is would wake the OOM killer."""
    limit = memory_limit.free_huge_page_bytes() if hugetlb else memory_limit.available_bytes()
    if limit is None or wanted_bytes <= limit:
        return
    size = format_size(wanted_bytes)
    remedy = (
        'set more huge pages aside (vm.nr_hugepages) or choose dram.huge_pages = "auto"'
        if hugetlb
        else "lower dram.size, or raise the memory limit of this service"
    )
    raise ConfigError(
        "DRAM_UNAVAILABLE",
        f"dram.size = {size}: only {format_size(limit >> 20 << 20)} are available; {remedy}",
        key="dram.size",
        value=size,
        limit=limit,
    )


def raise_descriptor_limit(segment_count: int) -> None:
    """Raises our soft limit of open files to what is wished, as far as the hard one allows.

    Raises:
        ConfigError: DRAM_DESCRIPTORS, when not even the segments and a few engines fit.
    """
    segments = segment_count * DESCRIPTORS_PER_SEGMENT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = segments + DESCRIPTORS_WISHED
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if limit < segments + DESCRIPTORS_AT_LEAST:
        raise too_many_descriptors(segment_count, limit)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def too_many_descriptors(segment_count: int, limit: int) -> ConfigError:
    """DRAM_DESCRIPTORS."""
    return ConfigError(
        "DRAM_DESCRIPTORS",
        f"{segment_count} segments need {segment_count * DESCRIPTORS_PER_SEGMENT} open files, the limit is "
        f"{limit}; raise dram.segment, or the limit (LimitNOFILE, ulimit -n)",
        key="dram.segment",
        limit=limit,
    )
