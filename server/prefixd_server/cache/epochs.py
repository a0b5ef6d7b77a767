"""Durable namespace epochs: a namespace that was dropped stays dropped.

One small file, replaced whole: write, fsync, rename, fsync the directory. What
could not be written stays owed until a later save has succeeded.
Without a data directory nothing outlives the process, and epochs start at the
wall clock's milliseconds, so that an epoch of an earlier boot is always lower.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from prefixd_server.base.clock import Clock
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.failpoints import failpoint

FILE_NAME = "epochs.json"
FORMAT_VERSION = 1
EPOCH_MAX = 2**63
"""Beyond what any clock gives in milliseconds; the wire's field has 64 bits."""


class Epochs:
    """Next epoch of every namespace that was ever dropped.

    Args:
        data_dir: where the file lives; None keeps epochs in memory only.
        clock: its wall time floors the epochs when there is no data directory.

    Raises:
        ConfigError: EPOCHS_UNREADABLE, when the file is damaged or too new.
    """

    def __init__(self, data_dir: Path | None, clock: Clock) -> None:
        self._path = None if data_dir is None else data_dir / FILE_NAME
        self._floor = int(clock.wall() * 1000) if data_dir is None else 1
        self._epochs: dict[str, int] = {}
        if self._path is not None and self._path.exists():
            self._epochs = _read(self._path)
        self._recorded_count = 0
        self._durable_count = 0
        """Of the epochs that were recorded in this boot; set by the one that saves."""
        self._saving = threading.Lock()
        """Held by the mover that writes the file."""

    @property
    def are_owed(self) -> bool:
        """Whether an epoch was recorded that is not durable yet, where anything is."""
        return self._path is not None and self._durable_count < self._recorded_count

    def fresh(self, tenant: str, fingerprint: bytes) -> int:
        """The epoch to open a namespace at."""
        return max(self._floor, self._epochs.get(_name(tenant, fingerprint), 1))

    def after(self, tenant: str, fingerprint: bytes, current: int) -> int:
        """Records in memory that `current` is over and returns the next epoch; save() makes it durable."""
        following = current + 1
        self._epochs[_name(tenant, fingerprint)] = following
        self._recorded_count += 1
        return following

    def save(self) -> None:
        """Makes what was recorded durable. Blocks; runs on a mover thread, after those that save already.

        Raises:
            OSError: it stays owed.
        """
        with self._saving:
            recorded_count = self._recorded_count
            if self._path is not None and self._durable_count < recorded_count:
                _write(self._path, dict(self._epochs))
                self._durable_count = recorded_count


def _name(tenant: str, fingerprint: bytes) -> str:
    return f"{tenant}/{fingerprint.hex()}"


def _write(path: Path, epochs: dict[str, int]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump({"format_version": FORMAT_VERSION, "epochs": epochs}, file)
        file.flush()
        os.fsync(file.fileno())
    failpoint("drop.written")
    temporary.replace(path)
    failpoint("drop.renamed")
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read(path: Path) -> dict[str, int]:
    try:
        content = json.loads(path.read_text())
        version = content["format_version"]
        epochs = {str(name): _epoch(epoch) for name, epoch in content["epochs"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            "EPOCHS_UNREADABLE",
            f"{path} is damaged ({error}); restore it, or remove the whole data directory to start empty",
        ) from error
    if version != FORMAT_VERSION:
        raise ConfigError(
            "EPOCHS_UNREADABLE",
            f"{path} has format version {version}, this daemon knows {FORMAT_VERSION}; run the release "
            "that wrote it",
        )
    return epochs


def _epoch(value: Any) -> int:
    epoch = int(value)
    if not 0 < epoch < EPOCH_MAX:
        raise ValueError(f"epoch {epoch} is out of range")
    return epoch
