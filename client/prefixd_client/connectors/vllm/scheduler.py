"""The connector's side in the engine's scheduler process: decides what to load and save, never waits.

The way of a request. vLLM asks how much is cached: the question goes to a background thread, and the answer
to vLLM is "ask again" until it is there. When blocks are allocated a LoadJob is made; workers redeem the
lease, copy, verify, and report how many blocks came out right. After a step has computed blocks, the next
step carries a SaveJob for them. A finished request's blocks are held until its saves are over.

Every hook is called on the scheduler's thread; none waits for an RPC, a file or another thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prefixd_client.namespace import NamespaceSpec
from prefixd_client.values import Tier, UsageReport

from .adapters import Adapters
from .asking import Asking, Cache, hits_beyond
from .estimates import Estimates
from .events import KvEvents
from .jobs import LoadJob, SaveJob
from .metadata import StepJobs, StepOutcomes
from .save_book import SaveBook, given_away
from .settings import Settings
from .tallies import Tallies
from .tracked import Phase, Tracked
from .usage import Life

_LOG = logging.getLogger(__name__)


class SchedulerSide:
    """One engine's requests. All methods on the scheduler's thread.

    Args:
        settings: the operator's.
        block_tokens: tokens per block.
        worker_count: workers that report each job.
        cache: the daemon's, called on background threads.
        tell_events: whether anybody follows vLLM's KV events.
        now: seconds of a monotonic clock.
    """

    def __init__(
        self,
        settings: Settings,
        block_tokens: int,
        worker_count: int,
        cache: Cache,
        *,
        tell_events: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._worker_count = worker_count
        self._cache = cache
        self._asking = Asking(cache)
        self._now = now
        self._adapters = Adapters(time.time_ns(), never_overwritten=settings.adapters_never_overwritten)
        self._base: NamespaceSpec | None = None
        self._tracked: dict[str, Tracked] = {}
        self._queued: set[str] = set()
        self._loading: dict[int, Tracked] = {}
        self._load_workers_left: dict[int, int] = {}
        self._job_ids = itertools.count(1)
        self._next_loads: list[LoadJob] = []
        self._next_saves: list[SaveJob] = []
        self._next_held: set[str] = set()
        self._next_reports: list[tuple[NamespaceSpec, Callable[[], UsageReport]]] = []
        self._book = SaveBook(worker_count)
        self._estimates = Estimates(block_tokens, settings.wait_max_s)
        self.events = KvEvents(block_tokens, enabled=tell_events)
        self.tallies = Tallies()

    # -- the namespace ------------------------------------------------------------------------------

    def use_namespace(self, spec: NamespaceSpec) -> None:
        """From now on requests live here; those that have computed anything are shared no more."""
        self._base = spec
        for tracked in self._tracked.values():
            if tracked.phase is Phase.LOADING or tracked.request.num_computed_tokens > 0:
                tracked.namespace, tracked.retired, tracked.barred = None, True, True
            else:
                tracked.drop_lease()
                tracked.saved_blocks = 0
                tracked.namespace = spec if tracked.request.lora_request is None else None
        for save in self._next_saves:
            self.events.saved(save.job_id, 0)
        self._next_saves.clear()

    @property
    def namespace(self) -> NamespaceSpec | None:
        """Of requests without an adapter; None before the workers have told how their memory looks."""
        return self._base

    # -- before a request runs ----------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """A request has come into the queue.

        The report names its run and its place: the daemon brings what of it lies on NVMe, until the request
        is reported to have started or ended.
        """
        tracked = self._track(request)
        run, place = request.block_hashes[:], len(self._queued)
        self._tell(tracked, partial(tracked.life.queued, run, place))
        self._queued.add(tracked.request_id)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own that can be loaded, and whether between steps; None: ask again.

        computed_tokens is the engine's own hit, a multiple of the block. At least one token is left to
        compute, as its logits are needed.
        """
        tracked = self._tracked.get(request.request_id) or self._track(request)
        skip = computed_tokens // self._block_tokens
        limit = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_tokens)
        tracked.quiet_below = 0
        if tracked.phase is Phase.LOADING:
            return 0, False
        if (
            self._base is None
            or tracked.barred
            or request.skip_reading_prefix_cache
            or not self._worth(limit - skip)
        ):
            if tracked.phase in (Phase.ASKED, Phase.FOUND):
                tracked.drop_lease()
            self._learn_namespace(tracked)
            return 0, False
        if tracked.phase in (Phase.ASKED, Phase.FOUND) and skip < tracked.skip_blocks:
            tracked.drop_lease()
        if tracked.phase is Phase.FOUND and tracked.lease is not None and tracked.lease.expired():
            tracked.drop_lease()
        if tracked.phase is Phase.IDLE:
            self._ask(tracked, request.block_hashes[:limit], skip)
        if tracked.phase is Phase.ASKED and not self._hear(tracked):
            return None, False
        if tracked.phase is not Phase.FOUND or tracked.lease is None:
            return 0, False
        tracked.own_blocks = skip
        found = min(tracked.lease.hit_count, limit) - skip
        if not self._worth(found) or not self._comes_sooner(found):
            tracked.drop_lease()
            tracked.phase = Phase.MISSED
            return 0, False
        return found * self._block_tokens, self._settings.async_load

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """Blocks are allocated; external_tokens are to be loaded. May be called twice for one load."""
        tracked = self._tracked.get(request.request_id) or self._track(request)
        if tracked.phase is Phase.LOADING:
            return
        if external_tokens <= 0 or tracked.lease is None or tracked.namespace is None:
            if tracked.phase is not Phase.MISSED:
                tracked.drop_lease()
            return
        skip, count = tracked.own_blocks, external_tokens // self._block_tokens
        job = LoadJob(
            job_id=next(self._job_ids),
            request_id=tracked.request_id,
            namespace=tracked.namespace,
            token=tracked.lease.token,
            start=skip - tracked.skip_blocks,
            block_ids=tuple(block_ids[skip : skip + count]),
            in_step=not self._settings.async_load,
        )
        tracked.phase = Phase.LOADING
        tracked.load_job_id, tracked.load_blocks = job.job_id, job.block_ids
        tracked.load_sources = hits_beyond(tracked.lease.run.hits, skip, count)
        tracked.life.loaded_tokens = external_tokens
        tracked.saved_blocks = skip + count
        self._loading[job.job_id] = tracked
        self._load_workers_left[job.job_id] = self._worker_count
        self._next_loads.append(job)
        self.tallies.add_hits(tracked.load_sources)

    def hit_sources(self, request: Any, external_tokens: int) -> dict[Tier, int]:
        """Tokens by the tier that holds them; they add up to external_tokens."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or external_tokens <= 0:
            return {}
        sources = {tier: blocks * self._block_tokens for tier, blocks in tracked.load_sources.items()}
        return sources if sum(sources.values()) == external_tokens else {}

    # -- a step -------------------------------------------------------------------------------------

    def build(self, output: Any) -> StepJobs:
        """The step's jobs: loads decided since the last, saves of blocks that earlier steps computed."""
        now = self._now()
        for request_id in output.num_scheduled_tokens:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.request.num_computed_tokens >= tracked.quiet_below:
                self._stepping(tracked, now, output)
        fences: frozenset[int] = frozenset()
        if len(self._book):
            fences = self._book.fences(given_away(output, self._next_loads, self._block_tokens))
        for save in self._next_saves:
            self._book.opened(save)
        is_waiting = not output.num_scheduled_tokens and any(map(Tracked.is_waiting, self._tracked.values()))
        jobs = StepJobs(self._next_loads, self._next_saves, fences, frozenset(self._next_held), is_waiting)
        self._next_loads, self._next_saves, self._next_held = [], [], set()
        if self._next_reports:
            self._asking.run(partial(self._send, self._next_reports))
            self._next_reports = []
        return jobs

    def outcomes(self, outcomes: StepOutcomes | None, invalid_blocks: set[int]) -> None:
        """What the workers have done since."""
        outcomes = outcomes or StepOutcomes()
        for job_id, (workers, good) in outcomes.loaded.items():
            self._loaded(job_id, workers, good, outcomes.load_seconds.get(job_id, 0.0))
        kept_count = dropped_count = 0
        for job_id, (workers, kept) in outcomes.saved.items():
            saved = self._book.reported(job_id, workers, kept)
            if saved is not None:
                kept_count += saved.saved
                dropped_count += saved.dropped
                if saved.dropped and saved.request_id in self._tracked:
                    self._tracked[saved.request_id].has_unkept = True
                self.events.saved(job_id, saved.saved)
        self.tallies.add(saved_blocks=kept_count, unsaved_blocks=dropped_count)
        if invalid_blocks:
            for tracked in list(self._loading.values()):
                if not invalid_blocks.isdisjoint(tracked.load_blocks):
                    tracked.barred = True

    # -- after a request ----------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """The request is over. True: its blocks are held until the workers report it as sent."""
        tracked = self._tracked.pop(request.request_id, None)
        self._queued.discard(request.request_id)
        if tracked is None:
            return False
        self._tell(tracked, partial(tracked.life.finished, self._now(), request, self._block_tokens))
        loading = tracked.phase is Phase.LOADING
        tracked.drop_lease()
        if loading or not block_ids:
            return False
        self._plan_save(tracked, block_ids, from_root=tracked.has_unkept)
        hold = self._book.is_saving(tracked.request_id) or any(
            save.request_id == tracked.request_id for save in self._next_saves
        )
        if hold:
            self._next_held.add(tracked.request_id)
        return hold

    def close(self) -> None:
        """Gives back every lease."""
        for tracked in self._tracked.values():
            tracked.drop_lease()
        self._asking.close()

    # -- inside -------------------------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked:
        namespace = self._base if request.lora_request is None else None
        tracked = Tracked(request, namespace, Life(request.request_id))
        self._tracked[request.request_id] = tracked
        return tracked

    def _worth(self, blocks: int) -> bool:
        return blocks > 0 and blocks * self._block_tokens >= self._settings.min_load_tokens

    def _comes_sooner(self, blocks: int) -> bool:
        if not self._settings.load_if_sooner or self._estimates.load_pays(blocks):
            return True
        self.tallies.add(passed_over_blocks=blocks)
        return False

    def _ask(self, tracked: Tracked, hashes: Sequence[bytes], skip: int) -> None:
        resolve = self._adapters.resolver(self._base, tracked.request.lora_request)
        wait_s = self._settings.wait_max_s
        if self._settings.load_if_sooner:
            wait_s = self._estimates.wait_s(len(hashes) - skip)
        tracked.question = self._asking.ask(resolve, hashes, skip, tracked.request_id, wait_s)
        tracked.skip_blocks = skip
        tracked.phase = Phase.ASKED

    def _learn_namespace(self, tracked: Tracked) -> None:
        """An adapter's namespace is wanted for saving, though there is nothing to load."""
        if tracked.namespace is not None or tracked.retired or self._base is None:
            return
        if tracked.question is None:
            resolve = self._adapters.resolver(self._base, tracked.request.lora_request)
            tracked.question = self._asking.ask(resolve, (), 0, tracked.request_id)
        elif tracked.question.answer is not None:
            tracked.namespace = tracked.question.answer.namespace

    def _hear(self, tracked: Tracked) -> bool:
        """Takes the answer, if it is there."""
        answer = tracked.question.answer if tracked.question is not None else None
        if answer is None:
            return False
        tracked.question = None
        tracked.lease, tracked.namespace = answer.lease, answer.namespace
        tracked.phase = Phase.FOUND if answer.lease is not None else Phase.MISSED
        self.tallies.add(questions=1, questions_found=int(answer.lease is not None))
        return True

    def _stepping(self, tracked: Tracked, now: float, output: Any) -> None:
        """One scheduled request: tells its life, and plans saves of what earlier steps have computed."""
        request, life = tracked.request, tracked.life
        if life.started_at is None:
            self._queued.discard(tracked.request_id)
            life.start(now, request, self._block_tokens)
            self._tell(tracked, life.started)
        elif life.prefilled_at is None and request.num_output_tokens > 0:
            self._estimates.computed(life.prefilled(now), life.computed_tokens(request, self._block_tokens))
        if tracked.phase is Phase.MISSED:
            tracked.phase = Phase.IDLE
        if tracked.namespace is None:
            self._learn_namespace(tracked)
        if self._computed_blocks(request) > tracked.saved_blocks:
            table = output.kv_connector_block_state.get_block_ids(tracked.request_id)
            if table is not None:
                self._plan_save(tracked, table[0])
        tracked.rest(self._block_tokens)

    def _computed_blocks(self, request: Any) -> int:
        """Leading full blocks whose KV is final: computed by steps that are over, and hashed."""
        tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if not self._settings.save_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        return int(min(tokens // self._block_tokens, len(request.block_hashes)))

    def _plan_save(self, tracked: Tracked, block_ids: Sequence[int], *, from_root: bool = False) -> None:
        """Makes a save job for the computed blocks that have none, if they may be shared."""
        if tracked.namespace is None or tracked.retired or not self._adapter_unchanged(tracked):
            return
        request = tracked.request
        last = min(self._computed_blocks(request), len(block_ids))
        first = 0 if from_root else tracked.saved_blocks
        if last <= first:
            return
        hashes = request.block_hashes
        save = SaveJob(
            job_id=next(self._job_ids),
            request_id=tracked.request_id,
            namespace=tracked.namespace,
            parent_hash=hashes[first - 1] if first else b"",
            hashes=tuple(hashes[first:last]),
            block_ids=tuple(block_ids[first:last]),
            recompute_cost_s=self._estimates.compute_s(last - first),
        )
        self._next_saves.append(save)
        self.events.planned(save, request, first)
        tracked.saved_blocks = last

    def _adapter_unchanged(self, tracked: Tracked) -> bool:
        """Whether the adapter's files are still, now that the engine has loaded them, the fingerprinted."""
        if tracked.request.lora_request is None:
            return True
        if tracked.adapter_check is None:
            tracked.adapter_check = self._asking.check(self._adapters.unchanged(tracked.request.lora_request))
        return tracked.adapter_check.done() and tracked.adapter_check.result()

    def _loaded(self, job_id: int, workers: int, good: int, seconds: float) -> None:
        """Workers have ended a load; a short one bars its request from asking again."""
        tracked = self._loading.get(job_id)
        if tracked is None:
            return
        self._estimates.loaded(seconds, good)
        if good < len(tracked.load_blocks):
            tracked.barred = True
            tracked.life.loaded_tokens = 0
            first, end = tracked.own_blocks + good, tracked.own_blocks + len(tracked.load_blocks)
            self.events.lost(tuple(map(bytes, tracked.request.block_hashes[first:end])))
        self._load_workers_left[job_id] -= workers
        if self._load_workers_left[job_id] > 0:
            return
        del self._loading[job_id], self._load_workers_left[job_id]
        if tracked.barred:
            tracked.saved_blocks = tracked.quiet_below = 0
        lease = tracked.load_ended()
        if lease is not None:
            self._asking.run(lease.release)

    def _tell(self, tracked: Tracked, report: Callable[[], UsageReport]) -> None:
        """Sends a report with the step; it is made on the background thread, of what does not change."""
        if self._settings.report_usage and tracked.namespace is not None:
            self._next_reports.append((tracked.namespace, report))

    def _send(self, reports: list[tuple[NamespaceSpec, Callable[[], UsageReport]]]) -> None:
        """On a background thread."""
        for namespace, report in reports:
            self._cache.report_usage(namespace, report())
