"""Writes a configuration as TOML: the sample file, `prefixd config show`, and the reference table."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from prefixd_server.base.config import SECTIONS, Config, TenantConfig
from prefixd_server.base.config_sources import ENVIRONMENT_PREFIX, all_keys
from prefixd_server.base.options import key_of

_HEAD = """\
# prefixd's configuration, with every key at its default and the reason for it.
# Flags override PREFIXD_* variables, those override this file. Check a file with
# `prefixd config check --config FILE`.

"""
_TENANT_HEAD = """
# Further tenants, one table each. The socket is the identity: whoever may open it is the tenant.
"""


def sample_toml() -> str:
    """deploy/prefixd.toml: every key, commented out at its default, with its reason."""
    config = Config()
    parts = [_HEAD, _explained(config.server, commented=True)]
    for name in SECTIONS:
        section = getattr(config, name)
        doc = (type(section).__doc__ or "").strip()
        parts.append(f"\n# {doc}\n[{name}]\n{_explained(section, commented=True)}")
    example = TenantConfig(name="batch")
    parts += [_TENANT_HEAD, "# [[tenants]]\n", _explained(example, commented=True)]
    return "".join(parts)


def shown_toml(config: Config) -> str:
    """The configuration in force, as a file that would give it again."""
    parts = [_plain(config.server)]
    parts += [f"\n[{name}]\n{_plain(getattr(config, name))}" for name in SECTIONS]
    parts += [f"\n[[tenants]]\n{_plain(tenant)}" for tenant in config.tenants]
    return "".join(parts)


def reference_table() -> str:
    """The table of docs/configuration.md: every key, its variable, its default, its reason."""
    lines = ["| key | variable | default | why |", "|---|---|---|---|"]
    for key, item in all_keys().items():
        variable = ENVIRONMENT_PREFIX + key.replace(".", "_").upper()
        shown = item.metadata["form"].show(item.default)
        lines.append(f"| `{key}` | `{variable}` | `{shown}` | {item.metadata['why']} |")
    return "\n".join(lines) + "\n"


def _lines(section: Any) -> list[tuple[str, str]]:
    """(line of TOML, reason) per field."""
    return [
        (
            f"{key_of(item.name)} = {item.metadata['form'].show(getattr(section, item.name))}",
            item.metadata["why"],
        )
        for item in dataclasses.fields(section)
    ]


def _plain(section: Any) -> str:
    return "".join(f"{line}\n" for line, _ in _lines(section))


def _explained(section: Any, *, commented: bool) -> str:
    mark = "# " if commented else ""
    parts = []
    for line, why in _lines(section):
        reason = textwrap.fill(why, width=100, initial_indent="# ", subsequent_indent="# ")
        parts.append(f"{reason}\n{mark}{line}\n")
    return "".join(parts)
