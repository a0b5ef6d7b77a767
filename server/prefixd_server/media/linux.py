"""Linux calls that Python does not offer, by way of libc. Each releases the GIL and raises OSError."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
"""Since Linux 5.14: makes pages present and writable without changing what is in them."""
MFD_HUGETLB = 0x0004
_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syscall.restype = ctypes.c_long

_SYSCALL_NUMBERS = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239},
    "aarch64": {"mbind": 235, "get_mempolicy": 236},
}


def _raise_errno(call: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}")


def madvise(address: int, length_bytes: int, advice: int) -> None:
    """madvise(2) over a page-aligned range of this process."""
    if _libc.madvise(address, length_bytes, advice):
        _raise_errno("madvise")


def punch_hole(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Gives the file's pages in the range back to the kernel; it reads as zeros, whoever maps it."""
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset_bytes, length_bytes):
        _raise_errno("fallocate")


def syscall(name: str, *arguments: object) -> int:
    """A system call that libc has no function for. Raises OSError, ENOSYS on machines not known here."""
    number = _SYSCALL_NUMBERS.get(platform.machine(), {}).get(name, -1)
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        _raise_errno(name)
    return result


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins; the mapping must stay open while the address is in use."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
