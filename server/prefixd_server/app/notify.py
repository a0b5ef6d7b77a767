"""Tells the service manager how the daemon does: ready, alive, stopping (sd_notify(3)). Without one, nothing.

The watchdog is fed by the event loop and by nothing else: a loop that hangs is
a daemon that hangs, and the manager ends it. Sends never block; what did not
get through is sent again at the next beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Self

BEATS_PER_WATCHDOG = 4
"""Feeds within one watchdog time: several may be lost or late before the manager acts."""
BEAT_S_MAX = 1.0
"""Longest time between two beats; how late the status line may be."""
STOP_MARGIN_S = 10.0
"""For closing what is open after a drain: transfers under way arrive, the index syncs."""


class Notifier:
    """The manager's socket.

    Args:
        address: of its datagram socket; "" when nobody listens.
        watchdog_s: longest silence before the manager ends the daemon; None for no watchdog.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._socket: socket.socket | None = None
        self._pending: dict[str, str] = {}
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            self._address = "\0" + address[1:] if address.startswith("@") else address

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """From NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID: see sd_notify(3), sd_watchdog_enabled(3)."""
        address = environment.get("NOTIFY_SOCKET", "")
        microseconds = environment.get("WATCHDOG_USEC", "")
        meant_for = environment.get("WATCHDOG_PID", str(os.getpid()))
        watched = microseconds.isdecimal() and int(microseconds) > 0 and meant_for == str(os.getpid())
        return cls(
            address if address.startswith(("/", "@")) else "", int(microseconds) / 1e6 if watched else None
        )

    @property
    def beat_s(self) -> float:
        """Time between two calls of beat()."""
        return min(BEAT_S_MAX, (self.watchdog_s or BEAT_S_MAX * BEATS_PER_WATCHDOG) / BEATS_PER_WATCHDOG)

    def ready(self, status: str) -> None:
        """The daemon serves."""
        self._tell(READY="1", STATUS=status)

    def beat(self, status: str) -> None:
        """The loop turns; `status` is one line for people."""
        self._tell(STATUS=status, **({"WATCHDOG": "1"} if self.watchdog_s else {}))

    def stopping(self, status: str, within_s: float) -> None:
        """The daemon goes; it asks for `within_s` and a margin, so that no drain is cut short."""
        extend_us = int((within_s + STOP_MARGIN_S) * 1e6)
        self._tell(STOPPING="1", STATUS=status, EXTEND_TIMEOUT_USEC=str(extend_us))

    def close(self) -> None:
        """Nothing is told any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, **fields: str) -> None:
        if self._socket is None:
            return
        self._pending |= {name: value.replace("\n", " ") for name, value in fields.items()}
        text = "\n".join(f"{name}={value}" for name, value in self._pending.items())
        with contextlib.suppress(OSError):
            self._socket.sendto(text.encode(), self._address)
            self._pending.clear()


async def keep_beating(notifier: Notifier, status: Callable[[], str]) -> None:
    """Beats until cancelled. What `status` raises ends it: then the daemon is not to live on."""
    while True:
        notifier.beat(status())
        await asyncio.sleep(notifier.beat_s)
