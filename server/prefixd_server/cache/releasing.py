"""The end of a read: what its holder reports bad is verified, then the lease is let go.

A holder's word counts whatever happens while a mover looks. Not here: how a lease
ends without a word (endings.py).
"""

from __future__ import annotations

from prefixd_server.base.errors import LimitReached, Unavailable
from prefixd_server.base.types import BadBlock, LeaseRelease, Slots
from prefixd_server.cache.bad_copies import BadCopies
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.sessions import Session, Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.verifying import Verifier
from prefixd_server.catalog.events import CopiesLeased, CopiesReleased
from prefixd_server.catalog.leases import LeasedPiece, ReadLease


class Releasing:
    """See the module."""

    def __init__(
        self,
        state: State,
        sessions: Sessions,
        endings: Endings,
        verifier: Verifier,
        bad_copies: BadCopies,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._endings = endings
        self._verifier = verifier
        self._bad_copies = bad_copies

    async def release(self, tenant: str, session_id: bytes, releases: list[LeaseRelease]) -> tuple[int, int]:
        """Ends shards of leases; verifies reported blocks first. (released, confirmed bad)."""
        session = self._sessions.get(tenant, session_id)
        released = confirmed = 0
        for entry in releases:
            for bad in entry.bad_blocks:
                confirmed += await self._confirm_bad(session, entry.token, bad)
            released += self._let_go(session, entry)
        return released, confirmed

    def _let_go(self, session: Session, entry: LeaseRelease) -> bool:
        """Ends what there is of the lease, which may have ended while its blocks were verified.

        An Acquire that chose this token and has not begun is refused when it does.

        Returns:
            Whether anything waited for the word.
        """
        ids = (session.tenant, session.instance_id)
        orphaned = self._endings.release_orphan(entry.token, *ids, entry.shards)
        lease = self._lease(session, entry.token)
        if lease is None:
            if not orphaned and not entry.shards:
                self._state.leases.forestall(session.tenant, entry.token)
            return orphaned
        self._endings.release_shards(lease, entry.shards or tuple(lease.shards))
        return True

    def _lease(self, session: Session, token: bytes) -> ReadLease | None:
        """The instance's live read lease."""
        lease = self._state.leases.held_by(token, session.tenant, session.instance_id)
        return lease if isinstance(lease, ReadLease) else None

    async def _confirm_bad(self, session: Session, token: bytes, bad: BadBlock) -> int:
        """Verifies one reported block; a bad copy is quarantined, counted and forgotten."""
        lease = self._lease(session, token)
        hold = lease.shards.get(bad.shard) if lease else None
        if lease is None or hold is None:
            return 0
        for piece in hold.pieces:
            index = bad.block_index - piece.first_block
            if piece.kv_group == bad.kv_group and 0 <= index < len(piece.slots):
                return await self._verify(lease, piece, piece.slots[index : index + 1])
        return 0

    async def _verify(self, lease: ReadLease, piece: LeasedPiece, slot: Slots) -> int:
        """Has a mover look at one copy; 1 when it was bad.

        The copy is leased meanwhile: its reader's lease may end before there is an
        answer, and the slot must not have become another block's by then.
        """
        if self._state.catalog.slots[piece.tier].row[slot[0]] < 0:
            return 0
        self._state.apply(CopiesLeased(piece.tier, slot))
        try:
            copy = (piece.tier, int(slot[0]))
            if await self._verifier.is_good(lease.namespace.spec, piece.kv_group, *copy):
                return 0
            return self._bad_copies.found(lease.tenant, *copy)
        except (LimitReached, Unavailable):
            # Nobody has looked, and whoever reads the block next reports it again.
            return 0
        finally:
            self._state.apply(CopiesReleased(piece.tier, slot))
