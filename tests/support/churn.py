"""A node in whose cache something changes at every turn."""

from __future__ import annotations

import random

from prefixd_server.base.types import LeaseRelease

from tests.support.engine import Engine
from tests.support.node import Node, chain, packed
from tests.support.specs import spec

BLOCK_BYTES = 4096


def engine_of(node: Node, model: str = "model", instance: str = "one") -> Engine:
    """An engine with small blocks."""
    ref = node.cache.open_namespace("red", spec(model, block_bytes=BLOCK_BYTES))
    return Engine(node, node.open_session("red", instance), ref, BLOCK_BYTES)


class Churn:
    """An engine that does something at every turn: stores, reads, gives back, evicts, drops its namespace."""

    def __init__(self, node: Node, seed: int) -> None:
        self.node, self.rng = node, random.Random(seed)
        self.engine = engine_of(node)
        self.known: list[list[object]] = [["root"]]
        self.tokens: list[bytes] = []
        self.models = 0

    def turn(self) -> None:
        """One of the things."""
        self.node.clock.advance(0.01)
        acts = [self.store] * 6 + [self.read] * 4 + [self.give_back] * 3 + [self.evict] * 2
        self.rng.choice([*acts, self.drop_rarely])()
        self.node.cache.step()

    def store(self) -> None:
        """A run that leaves a known one somewhere."""
        path = self.rng.choice(self.known)
        fresh = [self.rng.random() for _ in range(self.rng.randrange(1, 30))]
        path = [*path[: self.rng.randrange(len(path) + 1)], *fresh]
        self.engine.put(*path)
        self.known.append(path)

    def read(self) -> None:
        """Leases a run."""
        granted = self.engine.acquire(chain(*self.rng.choice(self.known)))
        if granted.lease is not None:
            self.tokens.append(granted.lease.token)

    def give_back(self) -> None:
        """Ends a lease."""
        if self.tokens:
            token = self.tokens.pop(self.rng.randrange(len(self.tokens)))
            ids = ("red", self.engine.session.session_id)
            self.node.run(self.node.cache.release(*ids, [LeaseRelease(token)]))

    def evict(self) -> None:
        """Part of a run, with all that hangs below."""
        path = self.rng.choice(self.known)
        keep = self.rng.randrange(len(path))
        self.node.cache.evict("red", self.engine.ref, packed(chain(*path)), keep)

    def drop_rarely(self) -> None:
        """The whole namespace, for another."""
        if self.rng.random() < 0.2:
            self.node.run(self.node.cache.drop_namespace("red", self.engine.ref))
            self.models += 1
            self.engine = engine_of(self.node, f"model {self.models}", f"engine {self.models}")
            self.tokens.clear()
