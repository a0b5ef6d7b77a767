"""One GPU, by the CUDA driver: memory, streams, events, nothing of slots.

The driver is loaded when the first Gpu is made, so a node without one pays nothing. Every call
may come from any thread: it makes the device's primary context current and restores what was.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

IPC_HANDLE_BYTES = 64
POLL_S_MIN = 20e-6
POLL_S_MAX = 1e-3
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: other streams' work is never waited for by accident."""
_DISABLE_TIMING = 2
"""CU_EVENT_DISABLE_TIMING: we only ask whether it is over."""
_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process."""


class CudaFault(OSError):
    """A call of the driver failed. reason is the driver's name of it, or ours, UPPER_SNAKE."""

    def __init__(self, reason: str, doing: str) -> None:
        super().__init__(f"{doing}: {reason}")
        self.reason = reason


class Gpu:
    """See the module. Holds the primary context until close().

    Args:
        uuid: "GPU-...", as nvidia-smi prints it; empty for the first device that is visible.

    Raises:
        CudaFault: CUDA_UNAVAILABLE without driver or bindings, DEVICE_UNKNOWN, or the driver's own.
    """

    def __init__(self, uuid: str = "") -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
            self.call("cuInit", 0)
        except (ImportError, RuntimeError) as error:
            raise CudaFault("CUDA_UNAVAILABLE", f"loading the CUDA driver ({error})") from error
        self._device = self._find(uuid)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)

    def _find(self, uuid: str) -> Any:
        for ordinal in range(self.call("cuDeviceGetCount")):
            device = self.call("cuDeviceGet", ordinal)
            self.uuid = uuid_text(bytes(self.call("cuDeviceGetUuid", device).bytes))
            if uuid in {"", self.uuid}:
                return device
        raise CudaFault("DEVICE_UNKNOWN", f"looking for {uuid or 'any device'}")

    def call(self, name: str, *values: Any) -> Any:
        """The value of a driver call, None where it has none. Raises CudaFault."""
        result, *answer = getattr(self._driver, name)(*values)
        if result.value:
            raise CudaFault(str(result.name), name)
        return answer[0] if answer else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Around calls that need a context."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    # -- memory --------------------------------------------------------------------------------

    def allocate(self, length_bytes: int) -> int:
        """Device memory; its address. Raises CudaFault, CUDA_ERROR_OUT_OF_MEMORY among others."""
        with self.current():
            return int(self.call("cuMemAlloc", length_bytes))

    def free(self, address: int) -> None:
        """Gives memory back. Nobody may have it open: the driver leaves open what happens then."""
        with self.current():
            self.call("cuMemFree", address)

    def export(self, address: int) -> bytes:
        """The IPC handle of an allocation, IPC_HANDLE_BYTES long."""
        with self.current():
            handle = self.call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        with self.current():
            result, free, _ = self._driver.cuMemGetInfo()
        if result.value:
            raise CudaFault(str(result.name), "cuMemGetInfo")
        return int(free)

    def pin(self, address: int, length_bytes: int) -> None:
        """Page-locks host memory, so that copies run at the link's speed and beside us."""
        with self.current():
            self.call("cuMemHostRegister", address, length_bytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        """Ends pin(). No copy may be under way there."""
        with self.current():
            self.call("cuMemHostUnregister", address)

    # -- streams -------------------------------------------------------------------------------

    def stream(self) -> int:
        """A new stream."""
        with self.current():
            return int(self.call("cuStreamCreate", _NON_BLOCKING))

    def end_stream(self, stream: int) -> None:
        """Gives a stream back."""
        with self.current():
            self.call("cuStreamDestroy", stream)

    def copy(self, target: int, source: int, length_bytes: int, stream: int, timeout_s: float) -> None:
        """Copies, from and to host or device memory, and waits until it is done.

        Raises:
            CudaFault: the bytes may or may not have been copied, or be copied at any later moment.
        """
        with self.current():
            event = self._event()
            self.call("cuMemcpyAsync", target, source, length_bytes, stream)
            self._wait(event, stream, timeout_s)

    def clear(self, address: int, length_bytes: int, stream: int, timeout_s: float) -> None:
        """Zeroes device memory and waits until it is done. Raises CudaFault as copy() does."""
        with self.current():
            event = self._event()
            self.call("cuMemsetD8Async", address, 0, length_bytes, stream)
            self._wait(event, stream, timeout_s)

    def _event(self) -> int:
        return int(self.call("cuEventCreate", _DISABLE_TIMING))

    def _wait(self, event: int, stream: int, timeout_s: float) -> None:
        """Waits until all that was given to the stream so far is done: by an event, never for the device."""
        self.call("cuEventRecord", event, stream)
        deadline = time.monotonic() + timeout_s
        pause = POLL_S_MIN
        while not self._is_done(event):
            if time.monotonic() > deadline:
                # The event stays: the driver may still signal it.
                raise CudaFault("CUDA_EVENT_STUCK", f"waiting {timeout_s:g} s for a copy")
            time.sleep(pause)
            pause = min(2 * pause, POLL_S_MAX)
        self.call("cuEventDestroy", event)

    def _is_done(self, event: int) -> bool:
        (result,) = self._driver.cuEventQuery(event)
        if result == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if result.value:
            raise CudaFault(str(result.name), "cuEventQuery")
        return True

    def close(self) -> None:
        """Lets go of the context; everything made with it must be given back. Once."""
        self.call("cuDevicePrimaryCtxRelease", self._device)


def uuid_text(raw: bytes) -> str:
    """16 bytes as nvidia-smi prints them."""
    digits = raw.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
