"""The index as the daemon sees it: durable commits, bulk loading, and a process that is kept alive.

RocksDB runs in a process of its own (child.py). When that process reports a
fault, dies or hangs, everything that waits for it fails with IndexUnavailable,
and another is started, with a growing pause. The event loop owns this.

    STARTING -> READY -> FAULTED -> READY ...     -> CLOSED
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.logs import logger
from prefixd_server.index.commits import CommitQueue, Group, fail, settle
from prefixd_server.index.frames import Frame, frame, pairs
from prefixd_server.index.line import IndexUnavailable, Line, open_line
from prefixd_server.index.records import Keys, NamespaceRecord, Records, decode_namespace, records_from

_log = logger(__name__)


class IndexState(Enum):
    """See the module."""

    STARTING = "starting"
    READY = "ready"
    FAULTED = "faulted"
    CLOSED = "closed"


OnChange: TypeAlias = Callable[[IndexState, Exception | None], None]
OpenProcess: TypeAlias = Callable[[Path, bytes, float, bool], Awaitable[Line]]
"""(directory, store UUID, reply timeout in seconds, make); see open_line()."""


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Bounds and times of the index process.

    reply_timeout_s is longer than the stall of a disk that recovers; a load
    gives its parts well within it.
    """

    pending_record_count_max: int = 65_536
    reply_timeout_s: float = 20.0
    restart_pause_min_s: float = 0.1
    restart_pause_max_s: float = 5.0


@dataclass(slots=True)
class IndexCounters:
    """Since the daemon's start. restarts: after a fault; corrupt_records: ignored and deleted."""

    restarts: int = 0
    groups: int = 0
    records: int = 0
    corrupt_records: int = 0
    resets: int = 0
    rebuilds: int = 0


def _for_want_of_room(fault: Exception | None) -> bool:
    return isinstance(fault, IndexUnavailable) and fault.disk_full


async def _end(line: Line | None, tasks: list[asyncio.Task[None]]) -> None:
    """Leaves nothing behind of an index process."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if line is not None:
        await line.end()


async def _undisturbed(work: Coroutine[None, None, None]) -> None:
    """Does the work to its end; whoever is cancelled meanwhile is cancelled after it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


class Index:
    """See the module.

    Args:
        directory: of the database; only the index process touches what is in it.
        store_uuid: of the data directories that it belongs to.
        on_change: told the new state, and the fault or refusal that led to it, on the loop.
        open_process: starts an index process; tests give one that fails.
    """

    def __init__(
        self,
        directory: Path,
        store_uuid: bytes,
        options: IndexOptions | None = None,
        on_change: OnChange | None = None,
        open_process: OpenProcess = open_line,
    ) -> None:
        self._directory = directory
        self._store_uuid = store_uuid
        self._options = options or IndexOptions()
        self._on_change = on_change
        self._open_process = open_process
        self._queue = CommitQueue(self._options.pending_record_count_max)
        self._work = asyncio.Event()
        self._moved = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._line: Line | None = None
        self._broken: asyncio.Future[Exception] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._refusal: ConfigError | None = None
        self._reason_told = ""
        self._was_opened = False
        """From then on the database is there; where it is not, none is made."""
        self._fault: Exception | None = None
        """What led to the state; None for READY."""
        self.state = IndexState.STARTING
        self.reason = ""
        """Why the state is what it is; empty when there is nothing to say."""
        self.counters = IndexCounters()

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> IndexState:
        """Starts the index process and waits for its first word; READY, or FAULTED and being retried.

        Raises:
            ConfigError: INDEX_REFUSED, with the remedy; it is not retried.
        """
        self._keeper = asyncio.create_task(self._keep(), name="index-keeper")
        async with self._moved:
            await self._moved.wait_for(lambda: self.state is not IndexState.STARTING)
        if self._refusal is not None:
            raise self._refusal
        return self.state

    async def ready(self) -> None:
        """Waits until the index is READY. Raises IndexUnavailable when closed, ConfigError as start()."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.state in {IndexState.READY, IndexState.CLOSED})
        if self._refusal is not None:
            raise self._refusal
        if self.state is IndexState.CLOSED:
            raise IndexUnavailable("the index is closed")

    @property
    def pending_record_count(self) -> int:
        """Records that wait to become durable, without the group under way."""
        return self._queue.record_count

    @property
    def pid(self) -> int | None:
        """The index process; None while there is none."""
        return self._line.pid if self._line else None

    async def close(self) -> None:
        """Ends the index process; commits still waiting fail. Idempotent."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper
        self._keeper = None

    # -- use -----------------------------------------------------------------------------------

    async def commit(
        self,
        puts: Records | None = None,
        deletes: Keys | None = None,
        namespaces: Sequence[NamespaceRecord] = (),
        forgotten: Sequence[bytes] = (),
    ) -> None:
        """Returns once all is durable: namespaces, deletes, forgotten, puts, in this order, each in its own.

        After a crash in between, a leading part of that order is there. Cancelling the
        caller does not cancel the commit.

        Args:
            puts: sealed records, parents first.
            deletes: keys, children first.
            forgotten: keys of namespaces.

        Raises:
            LimitReached: INDEX_QUEUE_FULL; nothing was taken.
            IndexUnavailable: see there; nothing was taken when the state was not READY.
        """
        self._require_ready()
        done = self._queue.add(puts, deletes, namespaces, forgotten)
        self._work.set()
        await asyncio.shield(done)

    async def namespaces(self) -> AsyncIterator[list[NamespaceRecord]]:
        """Every intact namespace record, at most LOAD_NAMESPACES at a time.

        Commits wait until the iteration ends; end it, or aclose() it.

        Raises:
            IndexUnavailable: see there; begin again.
        """
        async with self._asking() as line:
            kind, body = await line.ask(frame(Frame.NAMESPACES))
            while kind is Frame.PAIRS:
                yield [decode_namespace(key, value) for key, value in pairs(memoryview(body))]
                kind, body = await line.answer()
        self.counters.corrupt_records += json.loads(body)["corrupt"]

    async def load(self) -> AsyncIterator[Records]:
        """Every intact block record, in batches of at most LOAD_ROWS, in key order unless damage was found.

        Records are read-only. Commits wait until the iteration ends; end it, or aclose() it.

        Raises:
            IndexUnavailable: see there; begin again.
        """
        async with self._asking() as line:
            kind, body = await line.ask(frame(Frame.BLOCKS))
            while kind is Frame.ROWS:
                yield records_from(body)
                kind, body = await line.answer()
        end = json.loads(body)
        self.counters.corrupt_records += end["corrupt"]
        self.counters.rebuilds += end["damaged"]
        if end["corrupt"] or end["damaged"]:
            _log.warning("index records were damaged and are forgotten", **end)

    async def disk_bytes(self) -> int:
        """Bytes of the database's files. Raises IndexUnavailable."""
        async with self._asking() as line:
            return int((await line.numbers(Frame.STATISTICS))["disk_bytes"])

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[Line]:
        """The line, for one question and its answers; whoever leaves before the last answer breaks it."""
        self._require_ready()
        async with self._turn:
            line = self._require_ready()
            try:
                yield line
            except BaseException as error:  # whatever it was, the answers that follow are nobody's
                self._break(error if isinstance(error, Exception) else IndexUnavailable("left unanswered"))
                raise

    def _require_ready(self) -> Line:
        if self._line is None or self.state is not IndexState.READY:
            raise IndexUnavailable(
                self.reason or f"the index is {self.state.value}", disk_full=_for_want_of_room(self._fault)
            )
        return self._line

    def _break(self, error: Exception) -> None:
        """The line is of no more use; _live() tells everybody, and ends it."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(error)
            self._line = None
            self.state, self.reason, self._fault = IndexState.FAULTED, str(error), error

    # -- keeping it alive ----------------------------------------------------------------------

    async def _keep(self) -> None:
        pause = self._options.restart_pause_min_s
        try:
            while True:
                was_ready = await self._live()
                if self._refusal is not None:
                    return
                pause = self._options.restart_pause_min_s if was_ready else pause
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._options.restart_pause_max_s)
                self.counters.restarts += 1
        finally:
            self._queue.fail(IndexUnavailable("the index is closed"))
            await self._move(IndexState.CLOSED, self._refusal)

    async def _live(self) -> bool:
        """The life of one index process; whether it ever was ready. Leaves FAULTED, or a refusal."""
        line: Line | None = None
        tasks: list[asyncio.Task[None]] = []
        ready = False
        fault: Exception = IndexUnavailable("the index was not opened")
        self._broken = asyncio.get_running_loop().create_future()
        try:
            line = await self._open_process(
                self._directory, self._store_uuid, self._options.reply_timeout_s, not self._was_opened
            )
            await self._opened(line)
            ready = True
            tasks.append(asyncio.create_task(self._pump(line), name="index-pump"))
            tasks.append(asyncio.create_task(self._watch(line), name="index-watch"))
            fault = await self._broken
        except ConfigError as refusal:
            self._refusal = refusal
        except (IndexUnavailable, OSError) as error:
            fault = error
        finally:
            self._line = None
            await _undisturbed(_end(line, tasks))
        if self._refusal is None:
            self._queue.fail(fault)
            await self._move(IndexState.FAULTED, fault)
        return ready

    async def _opened(self, line: Line) -> None:
        _, body = await line.answer()
        reason = json.loads(body)["reset_reason"]
        if reason:
            self.counters.resets += 1
            _log.warning("the index could not be opened; an empty one takes its place", reason=reason)
        self._line = line
        self._was_opened = True
        await self._move(IndexState.READY, None)

    async def _pump(self, line: Line) -> None:
        """Sends group after group, one under way at a time."""
        group: Group | None = None
        fault: Exception = IndexUnavailable("the index failed with this commit under way")
        try:
            while True:
                await self._work.wait()
                async with self._turn:
                    group = self._queue.take()
                    if group is None:
                        self._work.clear()
                        continue
                    await line.ask(group.message)
                settle(group)
                self.counters.groups += 1
                self.counters.records += group.record_count
                group = None
        except IndexUnavailable as error:
            fault = error
            self._break(error)
        finally:
            if group is not None:
                fail([ticket for ticket, _ in group.shares], fault)

    async def _watch(self, line: Line) -> None:
        """Notices that the process is gone, also while nobody asks it anything."""
        status = await line.gone()
        self._break(IndexUnavailable(f"the index process ended (status {status})"))

    async def _move(self, state: IndexState, fault: Exception | None) -> None:
        self.state, self.reason, self._fault = state, "" if fault is None else str(fault), fault
        # Once per outage and reason: it is started again every few seconds.
        if state is IndexState.FAULTED and self.reason != self._reason_told:
            _log.error("index unavailable", reason=self.reason)
        self._reason_told = self.reason
        if self._on_change is not None:
            self._on_change(state, fault)
        async with self._moved:
            self._moved.notify_all()
