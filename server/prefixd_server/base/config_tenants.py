"""A tenant's configuration: who it is, and how much of the node it may have.

The first tenant's identity is among the keys of ServerConfig; it has no quotas,
since it is the operator's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefixd_server.base.options import AUTO_BYTES, flag, mode, option, path, size, text, texts, whole

WHY_CERTIFICATES = (
    "Names in certificates (subject alternative names, or the common name where there are none) whose "
    "holder is this tenant on the TCP address. Where no tenant has names or tokens, everybody there is "
    "the first tenant."
)
WHY_BEARERS = (
    "File with tokens, one a line, mode 0600: who sends one (`authorization: Bearer`) is this tenant on "
    "the TCP address. Read again when it changes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A further tenant: its name, its doors, its rights, its quotas."""

    name: str = option("", text(max_length=64, allow_empty=False), "Name in logs and metrics.")
    socket: Path | None = option(None, path(), "Its unix socket; whoever may open it is this tenant.")
    mode: int = option(0o660, mode(), "Permission bits of the socket.")
    group: str = option("", text(), "Group of the socket, name or number; empty keeps the daemon's own.")
    admin: bool = option(
        False,
        flag(),
        "Whether calls that concern the whole daemon (Drain, Check, all statistics) are allowed.",
    )
    certificate_names: tuple[str, ...] = option((), texts(), WHY_CERTIFICATES)
    token_file: Path | None = option(None, path(), WHY_BEARERS)
    quota_bytes: int = option(
        AUTO_BYTES,
        size("2MiB", "64TiB", auto=True),
        'Most DRAM that the tenant may hold, in whole segments; "auto" lets it use whatever others leave.',
    )
    hbm_quota_bytes: int = option(
        AUTO_BYTES, size("2MiB", "16TiB", auto=True), "The same for GPU memory, all devices together."
    )
    nvme_quota_bytes: int = option(
        AUTO_BYTES, size("2MiB", "1024TiB", auto=True), "The same for NVMe, in segments of nvme.segment."
    )
    namespace_count_max: int = option(
        0, whole(0, 65_536), "Most open namespaces; 0: catalog.namespace_count_max."
    )
    session_count_max: int = option(0, whole(0, 65_536), "Most open sessions; 0: leases.session_count_max.")
    lease_count_max: int = option(0, whole(0, 4_194_304), "Most live leases; 0: leases.lease_count_max.")
