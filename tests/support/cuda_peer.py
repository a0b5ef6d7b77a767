"""Another process that uses the driver: it does what it is told, one call a line.

    peer = CudaPeer(machine)
    pointer = peer.ask("open", handle_hex)

Run as a program it is that process.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any

from tests.support.fake_cuda import FakeCuda
from tests.support.repository import ROOT


class CudaPeer:
    """The process, from outside; leaving `with` ends it."""

    def __init__(self, machine: FakeCuda) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cuda_peer"],
            env=os.environ | machine.environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, verb: str, *values: Any) -> Any:
        """The answer; a refused call is answered by the error's name."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, *values]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        """Ends it without a word."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> CudaPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class _Refused(Exception):
    pass


class _Worker:
    def __init__(self) -> None:
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._call("cuInit", 0)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", 0))
        self._stream = self._call("cuStreamCreate", 1)

    def _call(self, name: str, *values: Any) -> Any:
        result, *answer = getattr(self._driver, name)(*values)
        if result.value:
            raise _Refused(result.name)
        return answer[0] if answer else None

    def allocate(self, size: int) -> int:
        return int(self._call("cuMemAlloc", size))

    def free(self, pointer: int) -> None:
        self._call("cuMemFree", pointer)

    def export(self, pointer: int) -> str:
        handle = self._call("cuIpcGetMemHandle", pointer)
        return ctypes.string_at(handle.getPtr(), 64).hex()

    def open(self, handle: str) -> int:
        made = self._driver.CUipcMemHandle()
        ctypes.memmove(made.getPtr(), bytes.fromhex(handle), 64)
        return int(self._call("cuIpcOpenMemHandle", made, 1))

    def close(self, pointer: int) -> None:
        self._call("cuIpcCloseMemHandle", pointer)

    def write(self, pointer: int, text: str) -> None:
        data = bytearray(text.encode())
        source = ctypes.addressof(ctypes.c_char.from_buffer(data))
        self._call("cuMemcpyHtoDAsync", pointer, source, len(data), self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def read(self, pointer: int, size: int) -> str:
        data = bytearray(size)
        target = ctypes.addressof(ctypes.c_char.from_buffer(data))
        self._call("cuMemcpyDtoHAsync", target, pointer, size, self._stream)
        self._call("cuStreamSynchronize", self._stream)
        return data.decode()

    def fork(self) -> str:
        """What a forked child is told by its parent's driver."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, self._driver.cuMemAlloc(4096)[0].name.encode())
            os._exit(0)
        os.waitpid(child, 0)
        return os.read(read, 100).decode()


def main() -> None:
    """Answers each line until the input ends."""
    worker = _Worker()
    for line in sys.stdin:
        verb, *values = json.loads(line)
        try:
            answer = getattr(worker, verb)(*values)
        except _Refused as refused:
            answer = str(refused)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
