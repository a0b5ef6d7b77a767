"""What the policy is told of requests: each used run once, and how its reply ended.

A request is used by its first Acquire or by the first report that it has started,
whichever comes first; a report that it is queued only leaves its run here. Uses
without a request id are each of a request of their own, which never ends.

Open requests are remembered within bounds: the oldest lose their runs first,
and then their names.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from prefixd_server.base.types import NO_ROW, Hashes, Rows, StopReason
from prefixd_server.cache.state import State
from prefixd_server.cache.watching import RequestBegan, RequestEnded, Watchers
from prefixd_server.catalog.events import ReplyEnded, RunUsed
from prefixd_server.catalog.namespaces import Namespace
from prefixd_server.policy.importance import PREFILL_MAX_S, Access, Newcomers

REQUEST_COUNT_MAX = 65_536
HASH_COUNT_MAX = 1 << 18
"""Hashes of open requests that are remembered: 8 MiB."""
BEGUN_COUNT_MAX = 4096
_SALT = 0x9E3779B97F4A7C15

Parts = Mapping[tuple[int, int], Rows]
"""Rows of the kept leading blocks of a run, by (shard, kv_group)."""
RequestName = tuple[str, str, str]
"""(tenant, instance id, the engine's request id)"""


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended, as far as it is known.

    run: its hashes; None when nobody has told them, or when they had to make room.
    access: what the policy made of its use; None before it.
    """

    namespace: Namespace
    run: Hashes | None = None
    access: Access | None = None
    used: bool = False
    used_at: float = 0.0


class Workload:
    """See the module. Owned by the event loop."""

    def __init__(self, state: State, watchers: Watchers) -> None:
        self._state = state
        self._watchers = watchers
        state.metered.append(self)
        self._open: OrderedDict[RequestName, OpenRequest] = OrderedDict()
        self._with_run: deque[OpenRequest] = deque()
        """Requests whose runs were remembered, the oldest first; some have lost theirs since."""
        self._hash_count = 0
        self._begun: OrderedDict[tuple[int, int], float] = OrderedDict()
        """When requests began that miss something, by namespace and the hash of the first block missed."""

    # -- a request's life ----------------------------------------------------------------------

    def queued(self, name: RequestName, namespace: Namespace, run: Hashes) -> None:
        """A request that has not begun tells its run."""
        request = self._request(name, namespace)
        if request.run is None and not request.used:
            self._remember(request, run)

    def used(self, name: RequestName, namespace: Namespace, run: Hashes, parts: Parts) -> bool:
        """A request uses the kept leading part of its run; False when that was counted already.

        Args:
            name: with an empty request id, this use is all there is of the request.
            run: from its first block on.
            parts: what is kept of it; the shortest part counts.
        """
        request = self._request(name, namespace) if name[2] else OpenRequest(namespace)
        if request.used:
            return False
        request.used = True
        request.used_at = self._state.clock.now()
        known = min((len(rows) for rows in parts.values()), default=0)
        request.access = self._learn(namespace, run, parts, known)
        if name[2] and request.run is None:
            self._remember(request, run)
        if known < len(run):
            self._begun[namespace.number, int(run[known, 0])] = request.used_at
            if len(self._begun) > BEGUN_COUNT_MAX:
                self._begun.popitem(last=False)
        self._tell_begun(name, namespace, run, known)
        for rows in parts.values():
            if known:
                self._state.apply(RunUsed(rows[:known], request.access.history_again))
        return True

    def used_part(self, namespace: Namespace, part: tuple[int, int], run: Hashes, rows: Rows) -> None:
        """A request without a name uses one shard and KV group; what is learned is learned of the first."""
        if part == (0, 0):
            self.used(("", "", ""), namespace, run, {part: rows})
        elif len(rows):
            self._state.apply(RunUsed(rows, self._history_of(int(rows[-1])) | 1))

    def newcomers(self, namespace: Namespace, missing: Hashes, above: int) -> Newcomers:
        """What is known of blocks that are to be stored below the row `above` (NO_ROW: the root)."""
        now = self._state.clock.now()
        history = 0 if above == NO_ROW else self._history_of(above)
        found = self._state.learner.newcomers(named_apart(namespace, missing), history, now)
        depth = 0 if above == NO_ROW else int(self._state.catalog.columns.depth[above]) + 1
        found = replace(found, weight=self._state.costs.weight_of_new(namespace, depth))
        if found.used_at is not None:
            return found
        begun = self._begun.get((namespace.number, int(missing[0, 0])), now)
        return replace(found, used_at=begun if now - begun <= PREFILL_MAX_S else now)

    def _history_of(self, row: int) -> int:
        catalog = self._state.catalog
        return int(catalog.tree.nodes.gap_class[catalog.columns.node[row]])

    def run_of(self, name: RequestName) -> Hashes | None:
        """The run of an open request, if it is remembered."""
        request = self._open.get(name)
        return None if request is None else request.run

    def was_used(self, name: RequestName) -> bool:
        """Whether the use of the request was counted."""
        request = self._open.get(name)
        return request is not None and request.used

    def ended(self, name: RequestName, output_token_count: int, stop: StopReason) -> None:
        """The reply has ended; what was not used since is of another class from now on.

        The name is remembered for a while: a late report must not count the request again.
        """
        request = self._open.get(name)
        if request is None or request.access is None:
            return
        tenant, instance_id, request_id = name
        wall = self._state.clock.wall()
        self._watchers.tell(tenant, RequestEnded(wall, instance_id, request_id, output_token_count, stop))
        reply = self._state.learner.on_finish(request.access, output_token_count, stop)
        catalog = self._state.catalog
        if request.run is not None:
            for space in request.namespace.spaces.values():
                rows = catalog.find_prefix(space, request.run)
                if len(rows):
                    self._state.apply(ReplyEnded(rows, request.used_at, reply))
        request.access = None
        self._forget_run(request)

    def _learn(self, namespace: Namespace, run: Hashes, parts: Parts, known: int) -> Access:
        columns, now = self._state.catalog.columns, self._state.clock.now()
        idle, fanout = 0.0, 0
        if known:
            row = int(parts[min(parts)][known - 1])
            idle = now - float(self._state.catalog.tree.last_use[columns.node[row]])
            fanout = int(columns.children[row]) + (known < len(run))
        return self._state.learner.on_access(named_apart(namespace, run), known, idle, fanout, now)

    def _tell_begun(self, name: RequestName, namespace: Namespace, run: Hashes, known: int) -> None:
        if self._watchers.watched(namespace.tenant):
            wall = self._state.clock.wall()
            event = RequestBegan(wall, namespace.ref, namespace.spec, name[1], name[2], run, known)
            self._watchers.tell(namespace.tenant, event)

    # -- memory --------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Memory of the remembered runs."""
        return self._hash_count * 32

    def _request(self, name: RequestName, namespace: Namespace) -> OpenRequest:
        request = self._open.get(name)
        if request is None:
            request = self._open[name] = OpenRequest(namespace)
            if len(self._open) > REQUEST_COUNT_MAX:
                self._forget_run(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(name)
        return request

    def _remember(self, request: OpenRequest, run: Hashes) -> None:
        request.run = run
        self._hash_count += len(run)
        self._with_run.append(request)
        while self._with_run[0].run is None or self._hash_count > HASH_COUNT_MAX:
            self._forget_run(self._with_run.popleft())

    def _forget_run(self, request: OpenRequest) -> None:
        if request.run is not None:
            self._hash_count -= len(request.run)
            request.run = None


def named_apart(namespace: Namespace, hashes: Hashes) -> Hashes:
    """The blocks under names of this namespace's own: one tenant's requests teach nothing of another's."""
    salt = np.uint64(namespace.number * _SALT & 0xFFFFFFFFFFFFFFFF)
    return hashes[:, :1] ^ salt
