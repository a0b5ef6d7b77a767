"""Epochs outlive the daemon, where there is a data directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.errors import ConfigError
from prefixd_server.cache.epochs import FILE_NAME, Epochs

NAME = ("red", b"\x01" * 32)


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
