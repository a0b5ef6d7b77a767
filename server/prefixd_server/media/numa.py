"""NUMA nodes of memory: binding a range to nodes, and telling where its pages are.

A kernel without NUMA has one node that nobody needs to name: binding to node 0
is granted, and where pages are is not told (None).
"""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

from prefixd_server.media.linux import syscall

_MPOL_BIND = 2
_MPOL_F_NODE = 1
_MPOL_F_ADDR = 2
_NODE_COUNT_MAX = 1024
_ONLINE = Path("/sys/devices/system/node/online")


def online_nodes() -> tuple[int, ...]:
    """Nodes of this machine, ascending; (0,) where the kernel does not tell."""
    try:
        text = _ONLINE.read_text().strip()
    except OSError:
        return (0,)
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return tuple(nodes)


def bind(address: int, length_bytes: int, nodes: tuple[int, ...]) -> None:
    """Pages of the range are taken from these nodes only, from now on.

    On a mapping of a memfd the rule belongs to the memfd, so it also holds for
    fallocate() and for other processes' faults.

    Raises:
        OSError: a node does not exist, or has no memory.
    """
    mask = sum(1 << node for node in set(nodes))
    words = (ctypes.c_ulong * (_NODE_COUNT_MAX // 64))()
    for index in range(len(words)):
        words[index] = (mask >> (64 * index)) & (2**64 - 1)
    length = ctypes.c_ulong(length_bytes)
    # The kernel reads one bit less than it is told (get_nodes in mm/mempolicy.c).
    bits = ctypes.c_ulong(_NODE_COUNT_MAX + 1)
    try:
        syscall(
            "mbind", ctypes.c_void_p(address), length, ctypes.c_int(_MPOL_BIND), words, bits, ctypes.c_uint(0)
        )
    except OSError as error:
        if error.errno != errno.ENOSYS or set(nodes) != {0}:
            raise


def node_of(address: int) -> int | None:
    """The node of the page at `address`, which is faulted in if need be; None on a kernel without NUMA."""
    node = ctypes.c_int(-1)
    flags = ctypes.c_ulong(_MPOL_F_NODE | _MPOL_F_ADDR)
    try:
        syscall(
            "get_mempolicy",
            ctypes.byref(node),
            ctypes.c_void_p(0),
            ctypes.c_ulong(0),
            ctypes.c_void_p(address),
            flags,
        )
    except OSError:
        return None
    return node.value
