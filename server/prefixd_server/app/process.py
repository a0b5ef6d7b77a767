"""One daemon as a process: signals, the service manager, the end. The daemon itself is daemon.py's."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Awaitable
from typing import Any

import uvloop

from prefixd_server.app.daemon import Daemon
from prefixd_server.app.exits import Exit
from prefixd_server.app.notify import Notifier, keep_beating
from prefixd_server.base.config import Config
from prefixd_server.base.logs import logger


def run(config: Config, *, takeover: bool = False) -> Exit:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends it at once. Raises PrefixdError.

    A takeover by another daemon ends it, too. One that fails when the node was let go of already has this
    process begin anew, as after any death: it does not return then.
    """
    # A watchdog's SIGABRT shows in the log where the loop hung.
    faulthandler.enable()
    status = uvloop.run(_serve_until_signalled(config, takeover))
    if status is None:
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - our own command line, no shell
    return status


async def _serve_until_signalled(config: Config, takeover: bool) -> Exit | None:
    """The exit status; None when the process is to begin anew."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    daemon = Daemon(config, takeover=takeover)
    await daemon.start()
    # What is there now stays for good: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    with contextlib.closing(Notifier.from_environment(os.environ)) as notifier:
        beating = asyncio.ensure_future(keep_beating(notifier, daemon.status))
        try:
            notifier.ready(daemon.status())
            await _first_of(beating, first.wait(), daemon.handing_over.wait())
            if await daemon.must_begin_anew():
                daemon.hurry()
                return None
            notifier.stopping("draining", config.drain.timeout_s)
            going = daemon.leave() if daemon.handing_over.is_over else daemon.drain()
            await _first_of(beating, going, second.wait())
        except Exception as error:  # whatever ended a background task: the daemon cannot keep its promises
            logger("prefixd.daemon").critical("a background task has ended", exc_info=error)
            return Exit.FAILED
        finally:
            beating.cancel()
            if second.is_set():
                daemon.hurry()
            await daemon.stop()
    return Exit.OK


async def _first_of(beating: asyncio.Future[Any], *waits: Awaitable[Any]) -> None:
    """Returns when one of `waits` is done; the others are cancelled. Raises what ended it or the beating."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait({beating, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
