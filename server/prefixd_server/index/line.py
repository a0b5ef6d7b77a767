"""One running index process, as the daemon's loop sees it: ask, read answers, notice its death.

A Line lives as long as its process; the one who starts another after a fault is
process.py. One question at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefixd_server.base.errors import ConfigError, Unavailable
from prefixd_server.index.frames import FRAME_BYTES_MAX, HEAD, Frame, frame

READ_AHEAD_BYTES = 4 << 20
CHILD_MODULE = "prefixd_server.index.child"


class IndexUnavailable(Unavailable):
    """The index process failed or is being started again.

    A commit that ends so may have become durable or not: a put is not to be
    trusted, a delete is to be repeated. disk_full: it failed for want of room.
    """

    def __init__(self, message: str, *, disk_full: bool = False) -> None:
        super().__init__("INDEX_UNAVAILABLE", message)
        self.disk_full = disk_full


class Line:
    """See the module. Made by open_line()."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        reply_timeout_s: float,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._reply_timeout_s = reply_timeout_s

    @property
    def pid(self) -> int:
        """The index process."""
        return self._process.pid

    async def ask(self, message: bytes) -> tuple[Frame, bytes]:
        """Sends a frame and reads the first answer. Raises as answer() does."""
        try:
            self._writer.write(message)
            await asyncio.wait_for(self._writer.drain(), self._reply_timeout_s)
        except (OSError, TimeoutError) as error:
            raise IndexUnavailable(f"the index process does not take what it is sent ({error})") from error
        return await self.answer()

    async def answer(self) -> tuple[Frame, bytes]:
        """The next answer.

        Raises:
            ConfigError: the index refuses to be opened; names the remedy.
            IndexUnavailable: it reported a fault, died, or did not answer in time.
        """
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                length, kind = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                if length > FRAME_BYTES_MAX:
                    raise IndexUnavailable(f"the index process sent a frame of {length} bytes")
                body = await self._reader.readexactly(length)
        except TimeoutError as error:
            raise IndexUnavailable(
                f"the index process did not answer within {self._reply_timeout_s:g} s"
            ) from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise IndexUnavailable("the index process died") from error
        if kind == Frame.FAULT:
            fault = json.loads(body)
            if fault["refused"]:
                raise ConfigError("INDEX_REFUSED", fault["message"])
            message = f"the index failed: {fault['message']}"
            raise IndexUnavailable(message, disk_full=fault["disk_full"])
        return Frame(kind), body

    async def numbers(self, kind: Frame) -> dict[str, Any]:
        """Asks a question without a body whose answer is named values."""
        _, body = await self.ask(frame(kind))
        return dict(json.loads(body))

    async def gone(self) -> int:
        """Waits until the process is gone; its exit status."""
        return await self._process.wait()

    async def end(self) -> None:
        """Kills the process and waits until it is gone, so that it holds no lock.

        It has no gentler end: what it answered for is durable, the rest is nobody's.
        """
        # Not Process.kill(): it may reap a process that has just ended, behind the back of who waits for it.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        await self._process.wait()


async def open_line(directory: Path, store_uuid: bytes, reply_timeout_s: float, make: bool) -> Line:
    """Starts an index process. Its first answer, OPENED, is still to be read. Raises OSError.

    Args:
        make: whether a database that is missing is made.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours, limit=READ_AHEAD_BYTES)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", CHILD_MODULE),
                *(str(theirs.fileno()), str(directory), store_uuid.hex()),
                *(["make"] if make else []),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:  # also when cancelled: nothing may stay open
            writer.close()
            await writer.wait_closed()
            raise
    return Line(process, reader, writer, reply_timeout_s)
