"""A fake daemon, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd_client import Client, Namespace

from tests.support.clients import PATIENT, spec
from tests.support.fake_daemon import FakeDaemon, fake_daemon
from tests.support.wire import short_directory


@pytest.fixture
def path() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory / "p.sock"


@pytest.fixture
def daemon(path: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(path) as fake:
        yield fake


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.path, options=PATIENT) as made:
        yield made


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return client.namespace(spec())
