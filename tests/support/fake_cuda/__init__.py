"""A stand-in for the CUDA driver, for machines without a GPU: see fake_cuda.h.

`FakeCuda` is one machine with devices: give its `environment` to every process
that should see it. In the test's own process `preload()` makes the library the
one that cuda-bindings finds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

MIB = 1 << 20
UUIDS_VARIABLE = "PREFIXD_TEST_DEVICES"
"""UUIDs of real devices, by commas, where the tests run on them."""
_SOURCES = Path(__file__).parent
_BUILT = _SOURCES.parents[2] / "build" / "fake_cuda"
_LIBRARY = "libcuda.so.1"
_CAPACITY, _LOST, _HUNG, _QUERIES, _DELAY, _USED, _OPENED = 8, 40, 48, 56, 64, 72, 104
_HEADER_BYTES = 120
_EVERY_DEVICE = 0b1111


def has_compiler() -> bool:
    """Whether the stand-in can be built here."""
    return shutil.which("gcc") is not None


@cache
def build() -> Path:
    """The directory that holds the library, built anew when a source is newer."""
    _BUILT.mkdir(parents=True, exist_ok=True)
    library = _BUILT / _LIBRARY
    sources = sorted(_SOURCES.glob("*.c"))
    newest = max(path.stat().st_mtime for path in [*sources, _SOURCES / "fake_cuda.h"])
    if not library.exists() or library.stat().st_mtime < newest:
        made = library.with_suffix(f".{os.getpid()}")
        options = ["-std=gnu11", "-O1", "-g", "-Wall", "-Werror", "-fPIC", "-shared"]
        subprocess.run(
            ["gcc", *options, f"-Wl,-soname,{_LIBRARY}", "-o", made, *sources, "-lpthread"], check=True
        )
        made.replace(library)
    return _BUILT


def uuid_of(device: int) -> str:
    """The UUID of the machine's device, as nvidia-smi would print it; of no device when there are fewer."""
    real = os.environ.get(UUIDS_VARIABLE, "").split(",")
    if real != [""]:
        return real[device] if device < len(real) else f"GPU-{device:08}-0000-0000-0000-000000000000"
    digits = bytes(0xA0 + 16 * device + at for at in range(16)).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


class FakeCuda:
    """One machine's devices. Closing it does not touch the processes that use it.

    Args:
        directory: empty; holds the devices' memory.
        device_count: devices, at most 4.
        capacity_bytes: memory of each.
    """

    def __init__(self, directory: Path, device_count: int = 1, capacity_bytes: int = 256 * MIB) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "ledger").open("w+b") as file:
            file.truncate(_HEADER_BYTES)
            self._header = mmap.mmap(file.fileno(), _HEADER_BYTES)
        self._capacity_bytes = capacity_bytes
        self._put(0, device_count)
        self.heal()

    @property
    def environment(self) -> dict[str, str]:
        """For processes that should find these devices."""
        return {"FAKE_CUDA_DIR": str(self.directory), "LD_LIBRARY_PATH": str(build())}

    def preload(self) -> None:
        """Makes this the machine of the calling process. Once: a driver is not initialised twice."""
        os.environ["FAKE_CUDA_DIR"] = str(self.directory)
        self._library = ctypes.CDLL(str(build() / _LIBRARY), mode=ctypes.RTLD_GLOBAL)

    def forget(self) -> None:
        """The calling process is as one that has used nothing yet: what a fault has left behind is gone."""
        self._library.fake_cuda_forget()

    # -- faults --------------------------------------------------------------------------------

    def set_capacity(self, capacity_bytes: int, device: int = 0) -> None:
        """What is in use stays; more is had only below this."""
        self._put(_CAPACITY + 8 * device, capacity_bytes)

    def lose(self, device: int = 0) -> None:
        """From now on every call on the device fails, in every process."""
        self._put(_LOST, self._get(_LOST) | 1 << device)

    def heal(self) -> None:
        """Ends every fault."""
        for offset in (_LOST, _HUNG, _QUERIES, _DELAY):
            self._put(offset, 0)
        for device in range(self._get(0)):
            self.set_capacity(self._capacity_bytes, device)

    @contextmanager
    def hanging(self, pid: int, device: int | None = None) -> Iterator[None]:
        """Meanwhile no operation of this process gets on, and no event completes: there, or anywhere."""
        devices = _EVERY_DEVICE if device is None else 1 << device
        self._put(_HUNG, pid | devices << 32)
        try:
            yield
        finally:
            self._put(_HUNG, 0)

    def slow(self, extra_polls: int = 0, copy_delay_us: int = 0) -> None:
        """Events take so many polls more, copies so much longer."""
        self._put(_QUERIES, extra_polls)
        self._put(_DELAY, copy_delay_us)

    # -- facts ---------------------------------------------------------------------------------

    @property
    def opened_count(self) -> int:
        """How often memory of one process was opened in another."""
        return self._get(_OPENED)

    @property
    def pinned_count(self) -> int:
        """Pieces of host memory that the calling process has pinned."""
        return int(self._library.fake_cuda_pinned_count())

    @property
    def violations(self) -> list[str]:
        """Every rule that was broken, in words; a good program leaves none."""
        path = self.directory / "violations"
        return path.read_text().splitlines() if path.exists() else []

    def in_use_bytes(self, device: int = 0) -> int:
        """Device memory in use, contexts included; the dead have given theirs back."""
        total = 0
        data = (self.directory / "ledger").read_bytes()
        for entry in struct.iter_unpack("<3Q34Q", data[_HEADER_BYTES:]):
            identity, where, size, *processes = entry
            if identity and where == device and any(map(_is_alive, processes[::2], processes[1::2])):
                total += size
        return total

    def _get(self, offset: int) -> int:
        return int(struct.unpack_from("<Q", self._header, offset)[0])

    def _put(self, offset: int, value: int) -> None:
        struct.pack_into("<Q", self._header, offset, value)


def _is_alive(pid: int, started: int) -> bool:
    """Whether the process is there, and the same one; a zombie is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() if pid else []
    except OSError:
        return False
    return bool(fields) and fields[0] not in {"Z", "X"} and int(fields[19]) == started
