"""Fixtures of the SGLang connector's tests. Without SGLang in the environment there is nothing to collect.

SGLang itself is real. Two packages that it cannot do without on a CPU are stand-ins: see standins/.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_command import DaemonCommand

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonCommand]:
    """One daemon for the tests of a module, which keep out of each other's way by namespaces of their own."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory, DaemonCommand(Path(directory)) as running:
        yield running


@pytest.fixture
def daemon(shared_daemon: DaemonCommand) -> Iterator[DaemonCommand]:
    """The module's daemon: its books balance after every test."""
    yield shared_daemon
    assert shared_daemon.problems() == []


@pytest.fixture
def own_daemon() -> Iterator[DaemonCommand]:
    """A daemon that the test may kill."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory, DaemonCommand(Path(directory)) as running:
        yield running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights."""
    from tests.support.vllm_models import TINY, make_model  # noqa: PLC0415 - needs transformers

    return make_model(tmp_path_factory.mktemp("model"), TINY, "bfloat16")


@pytest.fixture(scope="session")
def engine_configuration(model: Path) -> None:
    """SGLang's configuration of that model, published as a scheduler's process does it."""
    from sglang.srt import runtime_context  # noqa: PLC0415 - needs SGLang
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415 - needs SGLang

    arguments = ServerArgs(
        model_path=str(model), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True
    )
    runtime_context.publish(arguments, role="scheduler")


@pytest.fixture
def storage_of(request: pytest.FixtureRequest, engine_configuration: None) -> Iterator[Callable[..., Any]]:
    """Attaches storages to a daemon; their weights' name is one that no other test knows."""
    from tests.support.sglang_contract import attached, storage_config  # noqa: PLC0415 - needs SGLang

    made = []

    def make(daemon: DaemonCommand, pool: Any, **changes: Any) -> Any:
        extra = {
            "socket": str(daemon.socket),
            "weights_revision": request.node.nodeid,
            "lookup_timeout_s": 5.0,
            "wait_max_s": 8.0,
            "save_patience_s": 20.0,
        } | changes.pop("extra", {})
        is_complete = changes.pop("is_complete", True)
        made.append(attached(pool, storage_config(extra=extra, **changes), is_complete=is_complete))
        return made[-1]

    yield make
    for storage in made:
        storage.close()
