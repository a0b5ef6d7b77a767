"""Epochs outlive the daemon, where there is a data directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.errors import ConfigError, PrefixdError, Unavailable
from prefixd_server.base.types import NamespaceRef
from prefixd_server.cache import administration
from prefixd_server.cache.epochs import FILE_NAME, Epochs

from tests.support.busy_movers import JOB_COUNT_MAX, busy
from tests.support.node import Node, start_node
from tests.support.nvme_node import until
from tests.support.specs import spec

NAME = ("red", b"\x01" * 32)
OTHER = ("blue", NAME[1])


def test_a_dropped_namespace_stays_dropped_after_a_restart(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path, ManualClock())
    assert epochs.fresh(*NAME) == 1
    assert epochs.after(*NAME, current=1) == 2
    epochs.save()
    assert Epochs(tmp_path, ManualClock()).fresh(*NAME) == 2


def test_other_namespaces_keep_their_epoch(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path, ManualClock())
    epochs.after(*NAME, current=7)
    epochs.save()
    assert Epochs(tmp_path, ManualClock()).fresh("blue", NAME[1]) == 1


def test_without_a_directory_a_later_boot_starts_above_every_earlier_epoch() -> None:
    clock = ManualClock()
    first = Epochs(None, clock)
    dropped = first.after(*NAME, current=first.fresh(*NAME))
    clock.advance(2.0)
    assert Epochs(None, clock).fresh(*NAME) > dropped


def test_no_temporary_file_is_left_behind(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path, ManualClock())
    epochs.after(*NAME, current=1)
    epochs.save()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format_version": 2, "epochs": {}}', '{"format_version": 1, "epochs": {"a": "x"}}'],
)
def test_a_damaged_or_newer_file_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ConfigError) as refused:
        Epochs(tmp_path, ManualClock())
    assert refused.value.reason == "EPOCHS_UNREADABLE"
    assert FILE_NAME in str(refused.value)


def test_two_who_save_at_once_leave_what_both_have_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs, fsync = Epochs(tmp_path, ManualClock()), os.fsync
    second = threading.Thread(target=epochs.save)

    def and_meanwhile_the_other(descriptor: int) -> None:
        if second.ident is None:
            epochs.after(*OTHER, current=1)
            second.start()
            second.join(0.2)  # one that does not wait for us has come to its end by then
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", and_meanwhile_the_other)
    epochs.after(*NAME, current=1)
    epochs.save()
    second.join()
    again = Epochs(tmp_path, ManualClock())
    assert [again.fresh(*NAME), again.fresh(*OTHER)] == [2, 2]


@pytest.fixture
def blocked(tmp_path: Path) -> Callable[[], None]:
    """A data directory where epochs cannot be written until this is called."""
    in_the_way = tmp_path / "epochs.tmp"
    in_the_way.mkdir()
    return in_the_way.rmdir


def drop(node: Node, epoch: int) -> str:
    """Drops the namespace; why it was refused."""
    ref = node.cache.open_namespace("red", spec())
    with pytest.raises(PrefixdError) as refused:
        node.run(node.cache.drop_namespace("red", NamespaceRef(ref.fingerprint, epoch)))
    return refused.value.reason


def epoch_after_a_restart(data_dir: Path) -> int:
    node = start_node(data_dir=data_dir, tenants=("red",))
    epoch = node.cache.open_namespace("red", spec()).epoch
    node.close()
    return epoch


def test_a_drop_that_is_repeated_until_it_is_durable_is_durable(
    tmp_path: Path, blocked: Callable[[], None]
) -> None:
    node = start_node(data_dir=tmp_path, tenants=("red",))
    assert [drop(node, 1), drop(node, 1)] == ["DROP_NOT_DURABLE", "DROP_NOT_DURABLE"]
    assert node.cache.open_namespace("red", spec()).epoch == 2, "it is forgotten all the same"
    blocked()
    assert drop(node, 1) == "NAMESPACE_EPOCH_STALE"
    node.close()
    assert epoch_after_a_restart(tmp_path) == 2


def test_a_drop_that_could_not_be_made_durable_becomes_so_by_itself(
    tmp_path: Path, blocked: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration, "SAVE_RETRY_S", 0.01)
    node = start_node(data_dir=tmp_path, tenants=("red",))
    assert drop(node, 1) == "DROP_NOT_DURABLE"
    blocked()
    node.run(until((tmp_path / FILE_NAME).exists))
    node.close()
    assert epoch_after_a_restart(tmp_path) == 2


def test_a_drop_that_finds_no_mover_is_owed_too(tmp_path: Path) -> None:
    node = start_node(data_dir=tmp_path, tenants=("red",))
    ref = node.cache.open_namespace("red", spec())

    async def drop_meanwhile() -> None:
        async with busy(node.cache.state.movers, JOB_COUNT_MAX):
            await node.cache.drop_namespace("red", ref)

    with pytest.raises(Unavailable):
        node.run(drop_meanwhile())
    assert drop(node, 1) == "NAMESPACE_EPOCH_STALE"
    node.close()
    assert epoch_after_a_restart(tmp_path) == 2
