"""Fixtures of the tests over the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.daemon import running_daemon
from tests.support.wire_engine import wire_engine
from tests.wire.scene import BLOCK_BYTES, Scene


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """The scene, checked at its end."""
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path) as engine:
        made = Scene(daemon, engine, await engine.open_namespace(block_bytes=BLOCK_BYTES))
        yield made
        made.nothing_leaks()
