"""A node and its engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prefixd_server.base.types import NamespaceSpec

from tests.support.engine import Engine
from tests.support.node import Node, start_node
from tests.support.specs import spec

MakeEngine = Callable[..., Engine]


@pytest.fixture
def node() -> Iterator[Node]:
    started = start_node(tenants=("red", "blue"))
    yield started
    assert started.cache.check() == []
    started.close()


@pytest.fixture
def engine(node: Node) -> MakeEngine:
    """Makes engines: engine(tenant="red", instance="one", **spec changes)."""

    def make(
        tenant: str = "red", instance: str = "one", what: NamespaceSpec | None = None, **more: Any
    ) -> Engine:
        chosen = what or spec()
        ref = node.cache.open_namespace(tenant, chosen)
        session = node.open_session(tenant, instance)
        return Engine(node, session, ref, chosen.kv_groups[0].block_bytes, **more)

    return make
