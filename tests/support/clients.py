"""What tests of the client share: a namespace, blocks, patience."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
from prefixd_client import AsyncClient, Client, ClientOptions, KvGroup, Namespace, NamespaceSpec

BLOCK_BYTES = 4096
PATIENT = ClientOptions(lookup_timeout_s=10.0, write_timeout_s=10.0, open_wait_s=10.0, probe_pause_max_s=0.2)
"""For tests that are not about deadlines: this machine may be busy."""
UNTIL_S = 20.0


def spec(model_id: str = "model", **changes: Any) -> NamespaceSpec:
    """A namespace with one group of small blocks."""
    values: dict[str, Any] = {
        "model_id": model_id,
        "weights_fingerprint": "revision:1",
        "model_config_fingerprint": "00",
        "kv_dtype": "float32",
        "kv_layout": "test",
        "attention_backend": "sdpa",
        "block_tokens": 16,
        "kv_groups": (KvGroup(block_bytes=BLOCK_BYTES, layer_count=2),),
        "hash_algorithm": "sha256",
        "engine_name": "test",
        "layout_version": "1",
    }
    return NamespaceSpec(**(values | changes))


def run_of(count: int, name: str = "run") -> list[bytes]:
    """Prefix hashes of a run."""
    return [hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(count)]


def data_of(hashes: list[bytes], nbytes: int = BLOCK_BYTES) -> list[bytes]:
    """Bytes of blocks, told by their hashes."""
    return [
        np.random.default_rng(list(key)).integers(0, 256, nbytes, dtype=np.uint8).tobytes() for key in hashes
    ]


def empty(count: int, nbytes: int = BLOCK_BYTES) -> list[bytearray]:
    """Memory to load into."""
    return [bytearray(nbytes) for _ in range(count)]


def stored(namespace: Namespace, hashes: list[bytes], parent_hash: bytes = b"") -> list[bytes]:
    """Stores a run and returns its bytes."""
    data = data_of(hashes, namespace.spec.kv_groups[0].block_bytes)
    lease = namespace.reserve(hashes, parent_hash=parent_hash)
    assert lease is not None
    assert lease.store(data).visible == len(hashes)
    return data


def until(holds: Callable[[], object], what: str = "the state") -> None:
    """Waits for a state that another thread or process brings about."""
    deadline = time.monotonic() + UNTIL_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.005)


def is_ready(client: Client) -> bool:
    """Whether its calls go out."""
    return client.status().state == "ready"


class HeldCopies:
    """Holds a client's copies where they ask whether their lease is over: mapped, before the first block.

    Use it with `with`, once the leases are there. A copy that is not let go before the end copies nothing.

    Attributes:
        reached: set when a thread has come there.
    """

    def __init__(self, client: Client | AsyncClient) -> None:
        self._control = client.control
        self._now = client.control.now
        self._main = threading.current_thread()
        self._released = threading.Event()
        self._is_over = False
        self.reached = threading.Event()

    def __enter__(self) -> Self:
        self._control.now = self._held_now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = not self._released.is_set()
        self._control.now = self._now
        self._released.set()

    def go(self) -> None:
        """Lets them copy."""
        self._released.set()

    def _held_now(self) -> float:
        thread = threading.current_thread()
        if thread is self._main or thread.name.startswith("prefixd-"):
            return self._now()
        self.reached.set()
        assert self._released.wait(UNTIL_S), "the copies were not let go"
        return math.inf if self._is_over else self._now()
