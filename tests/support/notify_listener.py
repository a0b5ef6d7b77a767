"""A service manager's end of sd_notify(3): a datagram socket that collects what a daemon tells it."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

TELL_TIMEOUT_S = 20.0


class NotifyListener:
    """Listens at `path`; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def environment(self, watchdog_s: float | None = None) -> dict[str, str]:
        """What a manager sets for its service."""
        watchdog = {} if watchdog_s is None else {"WATCHDOG_USEC": str(int(watchdog_s * 1e6))}
        return {"NOTIFY_SOCKET": str(self.path), **watchdog}

    def next(self, timeout_s: float = TELL_TIMEOUT_S) -> dict[str, str]:
        """The next message, by field. Raises TimeoutError."""
        self._socket.settimeout(timeout_s)
        lines = self._socket.recv(65536).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def until(self, field: str) -> dict[str, str]:
        """Reads on to the next message that has `field`. Raises TimeoutError."""
        deadline = time.monotonic() + TELL_TIMEOUT_S
        while time.monotonic() < deadline:
            message = self.next()
            if field in message:
                return message
        raise TimeoutError(f"nobody said {field}")

    def all_waiting(self) -> list[dict[str, str]]:
        """Everything that has arrived and was not read yet."""
        messages = []
        while True:
            try:
                messages.append(self.next(0.001))
            except TimeoutError:
                return messages

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._socket.close()
