"""Every unary call of a namespace as a value: what to send, and how to read the answer.

The sync and the async client differ in how they send a Call; what it means is decided here, once. A call
without a session is answered by its miss, without asking anybody.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2

from . import calls
from .calls import AnswerRejected
from .control import Control, log
from .errors import InvalidArgument
from .failures import Failure
from .namespace import NamespaceSpec
from .outbox import Abort
from .session import Session
from .values import DeclineReason, Extent, PrefetchStatus, ReserveOutcome, RunHits, Tier

T = TypeVar("T")

TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One unary call.

    Args:
        method: of CacheService.
        request: its message.
        timeout_s: deadline, from the moment it is sent.
        read: the answer's message, and when the request was sent (monotonic seconds), to a value.
        miss: the value when the daemon is away or does not serve.
        session: to send it in; None: do not send, it is a miss.
        spec: the namespace concerned; opened anew when the daemon does not know it.
        ending: gives up what the daemon may have granted in an answer that nobody reads.
    """

    method: str
    request: Any
    timeout_s: float
    read: Callable[[Any, float], T]
    miss: T
    session: Session | None
    spec: NamespaceSpec
    ending: wire.LeaseRelease | Abort | None = None


@dataclass(frozen=True, slots=True)
class ReadGrant:
    """What Acquire and Redeem give."""

    session: Session
    grant: calls.Grant
    run: RunHits
    first_block: int
    extents: dict[tuple[int, int], tuple[Extent, ...]]


@dataclass(frozen=True, slots=True)
class WriteGrant:
    """What Reserve gives; the token is empty when no block was reserved."""

    session: Session
    grant: calls.Grant
    outcomes: tuple[ReserveOutcome, ...]
    decline_reason: DeclineReason
    retry_after_s: float | None
    extents: tuple[Extent, ...]


def succeeded(control: Control, call: Call[T], answer: Any, sent_at: float) -> T:
    """The value of an answer; a miss when it makes no sense."""
    try:
        return call.read(answer, sent_at)
    except AnswerRejected as error:
        log.warning("the answer of %s was rejected: %s", call.method, error)
        return unread(control, call)


def failed(control: Control, call: Call[T], failure: Failure) -> T:
    """Does what the failure calls for; the miss. Raises DaemonRefused for the caller's bugs."""
    if call.session is not None:
        control.follow(failure, call.session, call.spec)
    return call.miss if failure.reason else unread(control, call)


def unread(control: Control, call: Call[T]) -> T:
    """The miss of a call that was sent and whose answer nobody has read: what it was given is given up."""
    if call.session is not None and call.ending is not None and not control.is_closed:
        control.end_lease(call.session.boot_id, call.ending)
    return call.miss


class Operations:
    """The calls of one namespace."""

    def __init__(self, control: Control, spec: NamespaceSpec) -> None:
        self._control = control
        self._options = control.options
        self._spec = spec

    def session(self) -> tuple[Session | None, types_pb2.NamespaceRef | None]:
        """Where to ask, and for what; a None among them: nowhere. Raises ClientClosed, ForkedError."""
        session = self._control.ready_session()
        ref = session.refs.get(self._spec) if session is not None else None
        return (None, None) if ref is None else (session, ref)

    def _run(self, hashes: Sequence[bytes], session: Session | None) -> tuple[list[bytes], int]:
        """Checked hashes as far as one request takes them, and how many lie beyond."""
        run = calls.checked_hashes(hashes, self._spec)
        limit = session.opened.hash_count_max if session is not None else len(run)
        return run[:limit], max(0, len(run) - limit)

    def lookup(self, hashes: Sequence[bytes], timeout_s: float | None) -> Call[RunHits]:
        """See Namespace.lookup."""
        session, ref = self.session()
        run, beyond = self._run(hashes, session)
        return Call(
            "Lookup",
            wire.LookupRequest(namespace=ref, block_hashes=run),
            self._options.lookup_timeout_s if timeout_s is None else timeout_s,
            lambda answer, _sent_at: calls.run_hits(answer, len(run), beyond),
            RunHits((), 0, len(run) + beyond),
            session if run else None,
            self._spec,
        )

    def acquire(
        self,
        hashes: Sequence[bytes],
        skip_blocks: int,
        shards: Sequence[int],
        ttl_s: float | None,
        timeout_s: float | None,
        request_id: str,
        max_wait_s: float = 0.0,
    ) -> Call[ReadGrant | None]:
        """See Namespace.acquire."""
        session, ref = self.session()
        run, beyond = self._run(hashes, session)
        if not 0 <= skip_blocks <= len(run) + beyond:
            raise InvalidArgument("skip_blocks", skip_blocks, f"the run has {len(run)} blocks", "skip fewer")
        for shard in shards:
            calls.block_bytes_of(self._spec, shard, 0)
        wait_s = calls.checked_wait(max_wait_s)
        token = secrets.token_bytes(TOKEN_BYTES)
        request = wire.AcquireRequest(
            session_id=b"" if session is None else session.session_id,
            namespace=ref,
            block_hashes=run,
            skip_block_count=skip_blocks,
            redeem_shards=shards,
            ttl=calls.duration(ttl_s),
            request_id=request_id,
            max_wait=calls.duration(wait_s or None),
            token=token,
        )

        def read(answer: wire.AcquireResponse, sent_at: float) -> ReadGrant | None:
            hits = calls.run_hits(answer, len(run), beyond)
            if session is None or not answer.HasField("lease"):
                return None
            extents = calls.read_extents(answer, self._spec, len(run))
            for shard in shards:
                self._check_covered(extents, shard, skip_blocks, hits.hit_count)
            session.learn(answer.device_segments)
            grant = calls.grant_of(answer.lease, session.boot_id, sent_at)
            return ReadGrant(session, grant, hits, skip_blocks, extents)

        timeout = self._options.lookup_timeout_s if timeout_s is None else timeout_s
        can_map = session is not None and session.segments is not None
        return Call(
            "Acquire",
            request,
            timeout + wait_s,
            read,
            None,
            session if can_map and skip_blocks < len(run) else None,
            self._spec,
            wire.LeaseRelease(token=token),
        )

    def prefetch(
        self, hashes: Sequence[bytes], queue_position: int, deadline_s: float | None, timeout_s: float | None
    ) -> Call[PrefetchStatus | None]:
        """See Namespace.prefetch."""
        session, ref = self.session()
        run, beyond = self._run(hashes, session)
        try:
            wanted = wire.PrefetchRun(
                namespace=ref,
                block_hashes=run,
                queue_position=queue_position,
                deadline=calls.duration(deadline_s),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                "queue_position, deadline_s", (queue_position, deadline_s), str(error), "0 or more each"
            ) from error
        return Call(
            "Prefetch",
            wire.PrefetchRequest(session_id=b"" if session is None else session.session_id, runs=[wanted]),
            self._options.lookup_timeout_s if timeout_s is None else timeout_s,
            lambda answer, _sent_at: calls.prefetch_status_of(answer, len(run), beyond),
            None,
            session if run else None,
            self._spec,
        )

    def cancel_prefetch(self, prefetch_ids: Sequence[bytes]) -> Call[int]:
        """See Namespace.cancel_prefetch."""
        session, _ = self.session()
        request = wire.CancelPrefetchRequest(
            session_id=b"" if session is None else session.session_id, prefetch_ids=prefetch_ids
        )
        return Call(
            "CancelPrefetch",
            request,
            self._options.lookup_timeout_s,
            lambda answer, _sent_at: int(answer.cancelled_count),
            0,
            session if prefetch_ids else None,
            self._spec,
        )

    def keep_quiet(self, span_s: float) -> Call[bool]:
        """See Namespace.keep_quiet."""
        session, _ = self.session()
        if not 0 <= span_s < float("inf"):
            raise InvalidArgument("span_s", span_s, "must be 0 or more seconds", "give a finite span")
        request = wire.ReportUsageRequest(
            session_id=b"" if session is None else session.session_id, quiet_period=calls.duration(span_s)
        )
        return Call(
            "ReportUsage",
            request,
            self._options.control_timeout_s,
            lambda _answer, _sent_at: True,
            False,
            session,
            self._spec,
        )

    def redeem(self, token: bytes, shard: int) -> Call[ReadGrant | None]:
        """See Namespace.redeem."""
        session, _ = self.session()
        longest_run = session.opened.hash_count_max if session is not None else 0
        calls.block_bytes_of(self._spec, shard, 0)
        request = wire.RedeemRequest(
            session_id=b"" if session is None else session.session_id, token=token, shard=shard
        )

        def read(answer: wire.RedeemResponse, sent_at: float) -> ReadGrant | None:
            extents = calls.read_extents(answer, self._spec, longest_run)
            mine = extents.get((shard, 0), ())
            if session is None or not mine:
                return None
            first, last = mine[0].first_block, mine[-1].end_block
            self._check_covered(extents, shard, first, last)
            session.learn(answer.device_segments)
            grant = calls.grant_of(answer.lease, session.boot_id, sent_at)
            return ReadGrant(session, grant, RunHits(((Tier.UNKNOWN, last),), 0, 0), first, extents)

        can_map = session is not None and session.segments is not None
        return Call(
            "Redeem",
            request,
            self._options.lookup_timeout_s,
            read,
            None,
            session if can_map else None,
            self._spec,
            wire.LeaseRelease(token=token, shards=[shard]),
        )

    def reserve(
        self,
        hashes: Sequence[bytes],
        parent_hash: bytes,
        shard: int,
        kv_group: int,
        ttl_s: float | None,
        recompute_cost_s: float | None,
        in_hbm: bool = False,
    ) -> Call[WriteGrant | None]:
        """See Namespace.reserve."""
        session, ref = self.session()
        run, beyond = self._run(hashes, session)
        if parent_hash:
            calls.checked_hashes([parent_hash], self._spec, "parent_hash")
        block_bytes = calls.block_bytes_of(self._spec, shard, kv_group)
        token = secrets.token_bytes(TOKEN_BYTES)
        request = wire.ReserveRequest(
            session_id=b"" if session is None else session.session_id,
            namespace=ref,
            shard=shard,
            kv_group=kv_group,
            parent_hash=parent_hash,
            block_hashes=run,
            ttl=calls.duration(ttl_s),
            recompute_cost=calls.duration(recompute_cost_s),
            wanted_tier=types_pb2.TIER_HBM if in_hbm else types_pb2.TIER_UNSPECIFIED,
            token=token,
        )

        def read(answer: wire.ReserveResponse, sent_at: float) -> WriteGrant | None:
            if session is None:
                return None
            outcomes = calls.outcomes_of(answer, len(run), beyond)
            extents = calls.extents_of(answer.extents, block_bytes, len(run), with_checksums=False)
            reserved = [index for index, outcome in enumerate(outcomes) if outcome is ReserveOutcome.RESERVED]
            if reserved != [
                index for extent in extents for index in range(extent.first_block, extent.end_block)
            ]:
                raise AnswerRejected("extents and reserved blocks do not match")
            session.learn(answer.device_segments)
            grant = calls.Grant(b"", sent_at)
            if reserved:
                grant = calls.grant_of(answer.lease, session.boot_id, sent_at)
            retry = answer.retry_after.ToNanoseconds() / 1e9 if answer.HasField("retry_after") else None
            return WriteGrant(session, grant, outcomes, calls.decline_reason_of(answer), retry, extents)

        can_map = session is not None and session.segments is not None
        timeout = self._options.write_timeout_s
        return Call(
            "Reserve",
            request,
            timeout,
            read,
            None,
            session if can_map and run else None,
            self._spec,
            Abort(token),
        )

    def _check_covered(
        self, extents: dict[tuple[int, int], tuple[Extent, ...]], shard: int, first: int, last: int
    ) -> None:
        """Every KV group of the shard has exactly the blocks first to last - 1."""
        for kv_group in range(len(self._spec.kv_groups)):
            run = extents.get((shard, kv_group), ())
            if not run or run[0].first_block != first or run[-1].end_block != last:
                raise AnswerRejected(
                    f"extents of shard {shard}, KV group {kv_group} are not [{first}, {last})"
                )
