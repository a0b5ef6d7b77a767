"""The few calls of the CUDA driver that a client makes; the driver is loaded with the first Driver.

Every call may come from any thread: it makes the device's primary context, which the engine's own CUDA
runtime uses too, current and restores what was.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

IPC_HANDLE_BYTES = 64
_DISABLE_TIMING = 2
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1
_NON_BLOCKING = 1


class DeviceFault(OSError):
    """A call of the driver failed, or a copy did not end. reason is the driver's name of it, or ours."""

    def __init__(self, reason: str, doing: str) -> None:
        super().__init__(f"{doing}: {reason}")
        self.reason = reason


class Driver:
    """One GPU, as far as a client needs it.

    Args:
        uuid: "GPU-...", as nvidia-smi prints it.

    Raises:
        DeviceFault: no driver, no bindings, no such device.
    """

    def __init__(self, uuid: str) -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
            self._call("cuInit", 0)
        except (ImportError, RuntimeError) as error:
            raise DeviceFault("CUDA_UNAVAILABLE", f"loading the CUDA driver ({error})") from error
        self.ordinal, self._device = self._find(uuid)
        """The device's number in this process, for the driver and for torch alike."""
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)

    def _find(self, uuid: str) -> tuple[int, Any]:
        for ordinal in range(self._call("cuDeviceGetCount")):
            device = self._call("cuDeviceGet", ordinal)
            digits = bytes(self._call("cuDeviceGetUuid", device).bytes).hex()
            parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
            if f"GPU-{'-'.join(parts)}" == uuid:
                return ordinal, device
        raise DeviceFault("DEVICE_UNKNOWN", f"looking for {uuid}")

    def _call(self, name: str, *values: Any) -> Any:
        result, *answer = getattr(self._driver, name)(*values)
        if result.value:
            raise DeviceFault(str(result.name), name)
        return answer[0] if answer else None

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation; its address here. Once a handle: close() ends it."""
        made = self._driver.CUipcMemHandle()
        ctypes.memmove(made.getPtr(), handle, IPC_HANDLE_BYTES)
        with self._current():
            return int(self._call("cuIpcOpenMemHandle", made, _LAZY_PEER_ACCESS))

    def close(self, address: int) -> None:
        """Ends open(). No copy may be under way there."""
        with self._current():
            self._call("cuIpcCloseMemHandle", address)

    def pin(self, address: int, length_bytes: int) -> None:
        """Page-locks host memory."""
        with self._current():
            self._call("cuMemHostRegister", address, length_bytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        """Ends pin()."""
        with self._current():
            self._call("cuMemHostUnregister", address)

    def allocate(self, length_bytes: int) -> int:
        """Memory of the device; its address."""
        with self._current():
            return int(self._call("cuMemAlloc", length_bytes))

    def free(self, address: int) -> None:
        """Ends allocate(). No copy may be under way there."""
        with self._current():
            self._call("cuMemFree", address)

    def stream(self) -> int:
        """A new stream, which waits for no other by itself."""
        with self._current():
            return int(self._call("cuStreamCreate", _NON_BLOCKING))

    def end_stream(self, stream: int) -> None:
        """Gives a stream back. All that it was given has been waited for."""
        with self._current():
            self._call("cuStreamDestroy", stream)

    def follow(self, stream: int, event: int) -> None:
        """What the stream is given from now on happens after all that the event was recorded behind."""
        with self._current():
            self._call("cuStreamWaitEvent", stream, event, 0)

    def event(self) -> int:
        """A new event."""
        with self._current():
            return int(self._call("cuEventCreate", _DISABLE_TIMING))

    def copy(self, target: int, source: int, length_bytes: int, stream: int) -> None:
        """Gives the stream a copy, from and to host or device memory."""
        with self._current():
            self._call("cuMemcpyAsync", target, source, length_bytes, stream)

    def record(self, event: int, stream: int) -> None:
        """The event is done when all that the stream was given so far is."""
        with self._current():
            self._call("cuEventRecord", event, stream)

    def is_done(self, event: int) -> bool:
        """Whether it is."""
        with self._current():
            (result,) = self._driver.cuEventQuery(event)
        if result == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if result.value:
            raise DeviceFault(str(result.name), "cuEventQuery")
        return True

    def end_event(self, event: int) -> None:
        """Gives an event back."""
        with self._current():
            self._call("cuEventDestroy", event)

    def release(self) -> None:
        """Lets go of the context, with everything of it given back. Once."""
        self._call("cuDevicePrimaryCtxRelease", self._device)
