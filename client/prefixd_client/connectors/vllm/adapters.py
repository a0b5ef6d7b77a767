"""Tells adapters (LoRA) apart by content: vLLM's prefix hash names them by name and path only.

The engine loads an adapter when it likes, and keeps it under its number. What it has loaded is known only if
the files have not changed since the engine started and do not change later; an adapter for which that does
not hold is barred: its requests run, and nothing of them is loaded or saved.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prefixd_client.errors import PrefixdClientError
from prefixd_client.namespace import NamespaceSpec

from .asking import Resolve
from .identity import adapter_files, adapter_fingerprint, files_signature

_LOG = logging.getLogger(__name__)
Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found at first sight; fingerprint None is barred."""

    path: str
    signature: Signature
    fingerprint: str | None


class Adapters:
    """Adapters of one engine. Methods return functions that read files; those run on any thread.

    Args:
        started_ns: when the engine started, in ns of the wall clock: files changed later are not trusted.
        never_overwritten: the operator vouches that an adapter's files never change, however new they are.
    """

    def __init__(self, started_ns: int, *, never_overwritten: bool) -> None:
        self._started_ns = started_ns
        self._never_overwritten = never_overwritten
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}

    def resolver(self, base: NamespaceSpec | None, lora: Any | None) -> Resolve:
        """A function that finds a request's namespace; None where nothing may be shared."""
        if lora is None or base is None:
            return lambda: base
        return partial(self._resolve, base, lora)

    def unchanged(self, lora: Any) -> Callable[[], bool]:
        """A test that an adapter's files are still those that were fingerprinted; a change bars it."""
        return lambda: self._fingerprint(lora) is not None

    def _resolve(self, base: NamespaceSpec, lora: Any) -> NamespaceSpec | None:
        fingerprint = self._fingerprint(lora)
        return None if fingerprint is None else replace(base, adapter_fingerprint=fingerprint)

    def _fingerprint(self, lora: Any) -> str | None:
        number, path = int(lora.lora_int_id), str(lora.lora_path)
        with self._lock:
            known = self._known.get(number)
        if known is not None and known.fingerprint is None:
            return None
        try:
            signature = files_signature(adapter_files(path))
            finding = self._finding(lora, known, signature)
            if finding:
                self._bar(lora, signature, finding)
                return None
            if known is not None:
                return known.fingerprint
            fingerprint = adapter_fingerprint(path)
            if files_signature(adapter_files(path)) != signature:
                self._bar(lora, signature, "its files changed while they were read")
                return None
        except (OSError, PrefixdClientError) as error:
            self._bar(lora, (), f"its files cannot be read: {error}")
            return None
        with self._lock:
            self._known.setdefault(number, _Known(path, signature, fingerprint))
        return fingerprint

    def _finding(self, lora: Any, known: _Known | None, signature: Signature) -> str:
        """Why the engine may have loaded other bytes than these; empty when it cannot."""
        if lora.load_inplace:
            return "it is loaded in place, so requests of both contents run under one number"
        if known is not None and (known.path, known.signature) != (str(lora.lora_path), signature):
            return "its files are not those that the engine saw first under this number"
        newest_ns = max((mtime_ns for _, _, _, mtime_ns in signature), default=0)
        if newest_ns > self._started_ns and not self._never_overwritten:
            return (
                "its files changed after the engine started; if they never change once written, set "
                "kv_connector_extra_config.adapters_never_overwritten"
            )
        return ""

    def _bar(self, lora: Any, signature: Signature, finding: str) -> None:
        with self._lock:
            self._known[int(lora.lora_int_id)] = _Known(str(lora.lora_path), signature, None)
        _LOG.warning("prefixd: adapter %s is not shared: %s", lora.lora_name, finding)
