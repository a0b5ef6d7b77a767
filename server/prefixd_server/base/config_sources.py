"""Reads the configuration: flags over environment over file over defaults.

Every key has three names: `dram.size` in a file is `size` under `[dram]`, in
the environment PREFIXD_DRAM_SIZE, and on the command line `--set dram.size=...`
(the common ones have flags of their own). Only the file and `--tenant` can
name further tenants.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefixd_server.base.config import (
    SECTIONS,
    Config,
    ServerConfig,
    TenantConfig,
    config_error,
    section_type,
)
from prefixd_server.base.options import key_of

ENVIRONMENT_PREFIX = "PREFIXD_"
FILE_BYTES_MAX = 1 << 20
OWN_FLAGS = frozenset({"socket", "listen", "metrics", "data_dir", "dram.size", "log.format", "log.level"})
"""Keys with a flag of their own; the others are given by --set."""


def load_config(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    tenants: Iterable[str] = (),
) -> Config:
    """The checked configuration.

    Args:
        file: a TOML file, or None.
        environment: variables; those that name no key are left alone.
        flags: key -> text, for example {"dram.size": "1GiB"}.
        tenants: further tenants, each "name=...,socket=...,mode=0660,...".

    Raises:
        ConfigError: names the origin, key, value, limit and remedy.
    """
    reader = _Reader()
    if file is not None:
        reader.read_file(file)
    for key in reader.fields:
        name = ENVIRONMENT_PREFIX + key.replace(".", "_").upper()
        if environment and name in environment:
            reader.put(key, environment[name], f"environment variable {name}")
    for key, value in (flags or {}).items():
        reader.put(key, value, f"flag {flag_of(key)}")
    for item in tenants:
        reader.tenants.append(_tenant(_pairs(item), f"flag --tenant {item}"))
    return reader.config().checked()


def flag_of(key: str) -> str:
    """The flag that sets a key: its own, or --set."""
    return "--" + key.replace(".", "-").replace("_", "-") if key in OWN_FLAGS else f"--set {key}"


class _Reader:
    """Collects values key by key; a later put overrides an earlier one."""

    def __init__(self) -> None:
        self.fields = all_keys()
        self.values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}
        self.tenants: list[TenantConfig] = []

    def put(self, key: str, raw: object, origin: str) -> None:
        """Reads one value. Raises ConfigError."""
        item = self.fields.get(key)
        if item is None:
            raise config_error(origin, key, raw, _unknown(key, self.fields))
        self.values[key] = _read(item, raw, origin, key)
        self.origin[key] = origin

    def read_file(self, file: Path) -> None:
        """Reads a TOML file. Raises ConfigError."""
        origin = f"file {file}"
        for name, value in _parsed(file).items():
            if name == "tenants":
                if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
                    raise config_error(origin, name, value, "must be written as [[tenants]] tables")
                self.tenants += [_tenant(entry, origin) for entry in value]
            elif isinstance(value, dict):
                if name not in SECTIONS:
                    raise config_error(origin, f"[{name}]", "a table", _unknown(name, SECTIONS))
                for key, inner in value.items():
                    self.put(f"{name}.{key}", inner, origin)
            else:
                self.put(name, value, origin)

    def config(self) -> Config:
        """The configuration as collected, not yet checked across keys."""
        sections = {name: self._section(section_type(name), f"{name}.") for name in SECTIONS}
        return Config(
            server=self._section(ServerConfig, ""),
            tenants=tuple(self.tenants),
            origin=dict(self.origin),
            **sections,
        )

    def _section(self, kind: type[Any], prefix: str) -> Any:
        names = {item.name: prefix + key_of(item.name) for item in dataclasses.fields(kind)}
        return kind(**{name: self.values[key] for name, key in names.items() if key in self.values})


def all_keys() -> dict[str, dataclasses.Field[Any]]:
    """Every key outside of tenants, with its field, in the order of the sample file."""
    keys = {key_of(item.name): item for item in dataclasses.fields(ServerConfig)}
    for name in SECTIONS:
        keys |= {f"{name}.{key_of(item.name)}": item for item in dataclasses.fields(section_type(name))}
    return keys


def _parsed(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise config_error(f"file {file}", "size", f"> {FILE_BYTES_MAX}", "must be at most 1MiB")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise config_error("flag --config", "config", file, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise config_error(f"file {file}", "content", "not TOML", str(error)) from error


def _read(item: dataclasses.Field[Any], raw: object, origin: str, key: str) -> Any:
    try:
        return item.metadata["form"].read(raw)
    except ValueError as error:
        raise config_error(origin, key, raw, str(error)) from error


def _tenant(entry: Mapping[str, object], origin: str) -> TenantConfig:
    known = {key_of(item.name): item for item in dataclasses.fields(TenantConfig)}
    label = f"tenants[{entry.get('name', '?')}]"
    values: dict[str, Any] = {}
    for key, raw in entry.items():
        if key not in known:
            raise config_error(origin, f"{label}.{key}", raw, _unknown(key, known))
        values[known[key].name] = _read(known[key], raw, origin, f"{label}.{key}")
    if not values.get("name"):
        raise config_error(origin, f"{label}.name", "", "must be set")
    return TenantConfig(**values)


def _pairs(item: str) -> dict[str, str]:
    pairs = {}
    for part in item.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise config_error(
                f"flag --tenant {item}", "tenant", part, "must be key=value, separated by commas"
            )
        pairs[key.strip()] = value.strip()
    return pairs


def _unknown(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return "is not known" + (f"; did you mean {close[0]}?" if close else "; see `prefixd config sample`")
