"""Fixtures of the vLLM connector's tests. Without vLLM in the environment there is nothing to collect."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_command import DaemonCommand

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name: unix paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonCommand]:
    """One daemon for the tests of a module, which keep out of each other's way by namespaces of their own."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory, DaemonCommand(Path(directory)) as running:
        yield running


@pytest.fixture
def daemon(shared_daemon: DaemonCommand) -> Iterator[DaemonCommand]:
    """The module's daemon: its books balance after every test, and nobody holds anything."""
    yield shared_daemon
    assert shared_daemon.problems() == []
    assert shared_daemon.leases() == []


@pytest.fixture
def own_daemon(short_path: Path) -> Iterator[DaemonCommand]:
    """A daemon that the test may kill."""
    with DaemonCommand(short_path) as running:
        yield running


@pytest.fixture(scope="session")
def config_only_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is configured and never loaded."""
    from tests.support.vllm_harness import model_directory  # noqa: PLC0415 - needs vLLM

    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine_of(request: pytest.FixtureRequest, config_only_model: Path) -> Callable[..., Any]:
    """Makes engines of one model whose weights no other test knows."""
    from tests.support.vllm_harness import Harness  # noqa: PLC0415 - needs vLLM

    def make(daemon: DaemonCommand, **changes: Any) -> Harness:
        return Harness(
            daemon.socket, config_only_model, **{"weights_revision": request.node.nodeid, **changes}
        )

    return make


@pytest.fixture
def cache() -> Any:
    """A cache that answers at once."""
    from tests.support.vllm_hooks import Cache  # noqa: PLC0415 - needs vLLM

    return Cache()


@pytest.fixture
def side(cache: Any) -> Iterator[Any]:
    """A scheduler's side with its namespace open."""
    from prefixd_client.connectors.vllm.scheduler import SchedulerSide  # noqa: PLC0415 - needs vLLM
    from prefixd_client.connectors.vllm.settings import Settings  # noqa: PLC0415 - needs vLLM

    from tests.support.vllm_hooks import TOKENS  # noqa: PLC0415 - needs vLLM

    made = SchedulerSide(Settings(), TOKENS, 1, cache, now=lambda: 0.0)
    made.use_namespace("namespace")
    yield made
    cache.may_answer.set()
    made.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models lie, and the engines' logs and caches."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def engines(models: Path) -> Iterator[Any]:
    """Processes for vLLM engines."""
    from tests.support.vllm_process import EnginePool  # noqa: PLC0415 - needs the client

    pool = EnginePool(models)
    yield pool
    pool.close()
