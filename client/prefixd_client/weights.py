"""Fingerprint of weight files: sha256 over their content, remembered per file.

Hashing 16 GB takes half a minute, so each file's digest is kept in
$XDG_CACHE_HOME/prefixd/weights.json under its device, inode, size and time. Files changed in the last seconds
are hashed and not remembered: their time may not tell the next change. A cache that cannot be read or
written costs time, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from .errors import InvalidArgument

READ_BYTES = 4 << 20
SETTLED_S = 2.0
"""A file older than this can be told from its next version by time."""
REMEMBERED_FILE_COUNT_MAX = 10_000
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def weight_files_in(directory: Path) -> list[Path]:
    """The weight files of a directory, by name within each pattern."""
    return sorted(path for pattern in WEIGHT_PATTERNS for path in directory.glob(pattern))


def weight_files_of(model: str, revision: str | None, hub_cache: str | None) -> list[Path]:
    """The weight files of a model: a file, those of a directory, or those in the Hugging Face cache.

    Args:
        model: path or hub id.
        revision, hub_cache: as the engine's settings name them; for a hub id.

    Raises:
        OSError: a hub id that is not in the cache.
    """
    path = Path(model)
    if path.is_file():
        return [path]
    if path.is_dir():
        return weight_files_in(path)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with the engine, not with the client

    return weight_files_in(
        Path(snapshot_download(model, revision=revision, cache_dir=hub_cache, local_files_only=True))
    )


def weights_fingerprint(paths: Iterable[str | Path]) -> str:
    """ "sha256:<hex>" over names and contents of weight files, whatever their order and folder.

    Raises:
        InvalidArgument: no file given.
        OSError: a file cannot be read.
    """
    files = sorted((Path(path) for path in paths), key=lambda path: (path.name, str(path)))
    if not files:
        raise InvalidArgument("paths", "[]", "needs 1 file or more", "give the model's weight files")
    cache = _cache_path()
    known = _remembered(cache)
    digest = hashlib.sha256(b"prefixd-weights-v1\n")
    learnt = {}
    for path in files:
        key, changed_at = _version(path)
        content = known.get(key)
        if content is None:
            content = _content_digest(path)
            if time.time() - changed_at > SETTLED_S and _version(path)[0] == key:
                learnt[key] = content
        digest.update(f"{len(path.name)}:{path.name}:{content}\n".encode())
    if learnt:
        _remember(cache, {**known, **learnt})
    return f"sha256:{digest.hexdigest()}"


def _version(path: Path) -> tuple[str, float]:
    """What tells one version of a file from the next, and when it was made (seconds since the epoch)."""
    found = path.stat()
    key = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
    return key, found.st_mtime


def _content_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefixd" / "weights.json"


def _remembered(cache: Path) -> dict[str, str]:
    """What an earlier call has remembered; nothing when the file is absent or not ours."""
    try:
        entries = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: value for key, value in entries.items() if isinstance(value, str)}


def _remember(cache: Path, entries: dict[str, str]) -> None:
    """Replaces the cache file at once, newest entries last; the oldest go beyond the bound."""
    kept = dict(list(entries.items())[-REMEMBERED_FILE_COUNT_MAX:])
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache.parent, prefix="weights-")
        with os.fdopen(handle, "w") as file:
            json.dump(kept, file)
        Path(temporary).replace(cache)
    except OSError:
        return
