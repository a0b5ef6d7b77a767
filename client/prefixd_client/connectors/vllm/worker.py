"""The connector's side in a worker process: knows where the KV cache lies, loads and saves its shard.

Every step brings the scheduler's jobs. Fences come first, before memory is reused; loads between steps and
saves run on threads of their own; what has ended is told with the next step's outcomes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from prefixd_client.client import Client
from prefixd_client.namespace import isa_class

from .identity import WorkerFacts
from .kv_copies import KvCopies, open_copies
from .kv_memory import KvMemory
from .loads import LoadResults, Loads
from .metadata import StepJobs, StepOutcomes
from .namespaces import Namespaces
from .saves import Saves, SaveWay
from .settings import Settings
from .tallies import Tallies

_LOG = logging.getLogger(__name__)
GIVE_WAY_S = 0.001
"""As long as vLLM's own engine process sleeps after a step that computed nothing. An engine in its caller's
process does not sleep: it would take the interpreter's lock from every copy, for 5 ms at a time."""


class WorkerSide:
    """One worker. All methods on its main thread.

    Args:
        client: the worker's own, of the same engine instance as the scheduler's.
        settings: the operator's.
        layer_names: the KV cache group's layers, in order.
        shard: the worker's.
        writes: whether this rank is the one that writes the shard.
        copies: how the KV cache is copied; for each of two threads.
        give_way_s: longest pause of a step that only waits for the cache.
    """

    def __init__(
        self,
        client: Client,
        settings: Settings,
        layer_names: list[str],
        shard: int,
        *,
        writes: bool,
        copies: Callable[[KvMemory], KvCopies] = open_copies,
        give_way_s: float = GIVE_WAY_S,
    ) -> None:
        self._client = client
        self._settings = settings
        self._layer_names = layer_names
        self._shard = shard
        self._writes = writes
        self._open_copies = copies
        self._give_way_s = give_way_s
        self._namespaces = Namespaces(client)
        self._loads: Loads | None = None
        self._saves: Saves | None = None
        self._bad: set[int] = set()
        self._loaded: dict[int, int] = {}
        self._load_seconds: dict[int, float] = {}
        self._saved: dict[int, int] = {}
        self.tallies = Tallies()

    def register(
        self, kv_caches: Mapping[str, Any], layers: Mapping[str, Any], isa: str, block_count: int
    ) -> WorkerFacts:
        """The KV cache is there; returns how it looks.

        Args:
            kv_caches: tensor per layer name.
            layers: attention layer per layer name, which knows its backend.
            isa: the kernels' own name of the instruction set; empty where bytes do not depend on it.
            block_count: blocks that the scheduler knows.
        """
        self.close_copies()
        memory = KvMemory.of(kv_caches, self._layer_names, block_count)
        backends = sorted({backend_name(layers[name]) for name in kv_caches if name in layers})
        self._loads = Loads(self._open_copies(memory), self._shard, self._namespaces.open, self.tallies)
        self._saves = Saves(
            self._open_copies(memory),
            SaveWay(self._namespaces.open, self._client.run, self._settings.save_patience_s),
            self._shard,
            writes=self._writes,
            tallies=self.tallies,
        )
        return WorkerFacts(
            layouts=memory.layouts,
            attention_backend="+".join(backends) or "unknown",
            cpu_isa_class=f"{isa_class()};{isa}" if isa else "",
            on_device=memory.on_device,
        )

    def fence(self, jobs: StepJobs) -> None:
        """Before the step touches memory: saves whose sources it gives away are over."""
        if jobs.fences and self._saves is not None:
            self._saves.fence(jobs.fences)

    def start_loads(self, jobs: StepJobs) -> None:
        """Starts the step's loads; those that belong into the step are done on return."""
        if self._loads is not None:
            for job in jobs.loads:
                self._loads.start(job)

    def start_saves(self, jobs: StepJobs) -> None:
        """Queues the step's saves: of blocks that earlier steps have computed."""
        if self._saves is not None:
            for job in jobs.saves:
                self._saves.start(job)
            self._saves.hold(jobs.held_requests)

    def give_way(self, jobs: StepJobs) -> None:
        """In a step that only waits for the cache: lets the other threads work, until a load has ended."""
        if jobs.is_waiting and self._loads is not None:
            self._loads.wait(self._give_way_s)

    def finished(self) -> tuple[set[str], set[str]]:
        """(held requests whose saves are over, requests whose loads are over). Blocks that went wrong with
        those loads are in the next take_bad_blocks()."""
        loads = self._loads.take() if self._loads is not None else LoadResults()
        self._bad |= loads.bad
        self._loaded.update(loads.counts)
        self._load_seconds.update(loads.seconds)
        if self._saves is None:
            return set(), loads.done
        saves = self._saves.take()
        self._saved.update(saves.counts)
        return saves.sent, loads.done

    def take_bad_blocks(self) -> set[int]:
        """Blocks of the KV cache that were to be loaded and hold nothing usable."""
        bad, self._bad = self._bad, set()
        return bad

    def take_outcomes(self) -> StepOutcomes | None:
        """What ended, for the scheduler; None when nothing did."""
        outcomes = StepOutcomes(
            {job_id: (1, count) for job_id, count in self._loaded.items()},
            {job_id: (1, count) for job_id, count in self._saved.items()},
            self._load_seconds,
        )
        self._loaded, self._saved, self._load_seconds = {}, {}, {}
        return outcomes or None

    def close_copies(self) -> None:
        """Ends loads and saves; nobody touches the KV cache afterwards."""
        if self._loads is not None:
            self._loads.close()
        if self._saves is not None:
            self._saves.close()
        self._loads = self._saves = None

    def close(self) -> None:
        """Ends everything."""
        self.close_copies()
        self._client.close()


def backend_name(layer: Any) -> str:
    """Name of an attention layer's backend."""
    backend: Any = getattr(layer, "attn_backend", None) or getattr(layer, "backend", None)
    return str(backend.get_name()) if hasattr(backend, "get_name") else str(backend)
