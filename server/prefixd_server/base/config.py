"""The daemon's configuration, put together from its sections and checked.

The sections are in config_sections.py; the sample file and
docs/configuration.md are generated from them. How files, variables and flags
are read is told in config_sources.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from prefixd_server.base.config_sections import (
    CatalogConfig,
    DrainConfig,
    DramConfig,
    HbmConfig,
    LeaseConfig,
    LogConfig,
    MigrationConfig,
    MoverConfig,
    NvmeConfig,
    PolicyConfig,
    ServerConfig,
    TlsConfig,
)
from prefixd_server.base.config_tenants import TenantConfig
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.options import AUTO_BYTES
from prefixd_server.base.sizes import format_size

__all__ = [
    "MIB",
    "SECTIONS",
    "SEGMENT_ALIGNMENT_BYTES",
    "SOCKET_PATH_BYTES_MAX",
    "CatalogConfig",
    "Config",
    "DrainConfig",
    "DramConfig",
    "HbmConfig",
    "LeaseConfig",
    "LogConfig",
    "MigrationConfig",
    "MoverConfig",
    "NvmeConfig",
    "PolicyConfig",
    "ServerConfig",
    "TenantConfig",
    "TlsConfig",
    "config_error",
    "default_socket_path",
    "is_loopback",
    "section_type",
]

MIB = 1 << 20
SEGMENT_ALIGNMENT_BYTES = 2 * MIB
HBM_DEVICE_COUNT_MAX = 32
"""More than a node has; each costs 18 bytes of metadata a prefix-tree node."""
SHOWN_LENGTH_MAX = 256
"""Characters of a value that a complaint quotes."""
SOCKET_PATH_BYTES_MAX = 103
"""A unix socket's path has at most 107 bytes, and the companion adds ".fd"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything. Make one with `checked()`; what it returns is complete and consistent."""

    server: ServerConfig = field(default_factory=ServerConfig)
    tenants: tuple[TenantConfig, ...] = ()
    dram: DramConfig = field(default_factory=DramConfig)
    hbm: HbmConfig = field(default_factory=HbmConfig)
    nvme: NvmeConfig = field(default_factory=NvmeConfig)
    leases: LeaseConfig = field(default_factory=LeaseConfig)
    catalog: CatalogConfig = field(default_factory=CatalogConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    movers: MoverConfig = field(default_factory=MoverConfig)
    drain: DrainConfig = field(default_factory=DrainConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    origin: dict[str, str] = field(default_factory=dict, compare=False)
    """Where each key that is not a default came from, for messages: "dram.size" -> "flag --dram-size"."""

    @property
    def socket_path(self) -> Path:
        """The first tenant's socket."""
        return self.server.socket or default_socket_path()

    @property
    def segment_bytes(self) -> int:
        """Bytes of one DRAM segment, "auto" worked out."""
        if self.dram.segment_bytes != AUTO_BYTES:
            return self.dram.segment_bytes
        wanted = min(max(self.dram.size_bytes // 32, 16 * MIB), 256 * MIB)
        return min(wanted, self.dram.size_bytes) // SEGMENT_ALIGNMENT_BYTES * SEGMENT_ALIGNMENT_BYTES

    @property
    def segment_count(self) -> int:
        """DRAM segments that fit into the size."""
        return self.dram.size_bytes // self.segment_bytes

    @property
    def hbm_devices(self) -> tuple[str, ...]:
        """UUIDs of the HBM tier's devices; one that is empty stands for the first device that there is."""
        return self.hbm.devices or (self.hbm.device,)

    @property
    def hbm_segment_count(self) -> int:
        """Segments of the HBM tier on each of its devices; 0 when it is off."""
        return 0 if self.hbm.size_bytes == AUTO_BYTES else self.hbm.size_bytes // self.hbm.segment_bytes

    @property
    def nvme_directories(self) -> tuple[Path, ...]:
        """The NVMe tier's directories; none when it is off."""
        if self.nvme.size_bytes == AUTO_BYTES:
            return ()
        if self.nvme.directories:
            return self.nvme.directories
        return () if self.server.data_dir is None else (self.server.data_dir / "nvme",)

    @property
    def all_tenants(self) -> tuple[TenantConfig, ...]:
        """The first tenant, with all rights, then the others."""
        server = self.server
        first = TenantConfig(
            name=server.tenant,
            socket=self.socket_path,
            mode=server.socket_mode,
            group=server.socket_group,
            admin=True,
            certificate_names=server.certificate_names,
            token_file=server.token_file,
        )
        return (first, *self.tenants)

    def checked(self) -> Config:
        """This configuration, after every check that spans keys.

        Raises:
            ConfigError: names the origin, key, value, limit and remedy.
        """
        self._check_sizes()
        self._check_tenants()
        self._check_addresses()
        return self

    def _check_addresses(self) -> None:
        server, tls = self.server, self.tls
        if (tls.certificate is None) != (tls.key is None):
            missing = "tls.certificate" if tls.certificate is None else "tls.key"
            raise self.error(missing, "", "must be given: a certificate and its key go together")
        if tls.client_ca is not None and tls.certificate is None:
            raise self.error("tls.client_ca", tls.client_ca, "needs tls.certificate and tls.key")
        asked = tls.client_ca is not None or any(tenant.token_file for tenant in self.all_tenants)
        if server.listen and not is_loopback(server.listen) and not (tls.certificate and asked):
            raise self.error(
                "listen",
                server.listen,
                "must be a loopback address unless callers show certificates or tokens, by TLS: set "
                "tls.certificate and tls.key, with tls.client_ca or a token_file",
            )
        for tenant in self.all_tenants:
            if tenant.certificate_names and tls.client_ca is None:
                where = f"tenants[{tenant.name}].certificate_names"
                raise self.error(where, ", ".join(tenant.certificate_names), "needs tls.client_ca")
        if server.metrics and not server.metrics_exposed and not is_loopback(server.metrics):
            raise self.error(
                "metrics", server.metrics, "must be a loopback address unless metrics_exposed = true"
            )

    def _check_sizes(self) -> None:
        segment = self.dram.segment_bytes
        if segment % SEGMENT_ALIGNMENT_BYTES:
            raise self.error("dram.segment", format_size(segment), "must be a multiple of 2MiB")
        hbm = self.hbm
        if hbm.segment_bytes % SEGMENT_ALIGNMENT_BYTES:
            raise self.error("hbm.segment", format_size(hbm.segment_bytes), "must be a multiple of 2MiB")
        if hbm.size_bytes != AUTO_BYTES and (hbm.size_bytes % hbm.segment_bytes or not hbm.size_bytes):
            limit = f"must be a multiple of hbm.segment = {format_size(hbm.segment_bytes)}"
            raise self.error("hbm.size", format_size(hbm.size_bytes), limit)
        if hbm.devices and hbm.device:
            raise self.error("hbm.device", hbm.device, "must not be given beside hbm.devices: name it there")
        if not len(set(hbm.devices)) == len(hbm.devices) <= HBM_DEVICE_COUNT_MAX:
            limit = f"must be at most {HBM_DEVICE_COUNT_MAX} UUIDs, each once"
            raise self.error("hbm.devices", ", ".join(hbm.devices), limit)
        if self.nvme.segment_bytes % SEGMENT_ALIGNMENT_BYTES:
            size_text = format_size(self.nvme.segment_bytes)
            raise self.error("nvme.segment", size_text, "must be a multiple of 2MiB")
        if self.migration.low_water >= self.migration.high_water:
            limit = f"must be below migration.high_water = {self.migration.high_water:g}"
            raise self.error("migration.low_water", f"{self.migration.low_water:g}", limit)
        if self.nvme.size_bytes != AUTO_BYTES and not self.nvme_directories:
            raise self.error(
                "nvme.directories", "[]", "must be given, since there is no data_dir to put them in"
            )
        if segment > self.dram.size_bytes:
            limit = f"must not exceed dram.size = {format_size(self.dram.size_bytes)}"
            raise self.error("dram.segment", format_size(segment), limit)

    def _check_tenants(self) -> None:
        names: set[str] = set()
        sockets: set[Path] = set()
        holders: set[str] = set()
        for tenant in self.all_tenants:
            where = f"tenants[{tenant.name}]"
            if tenant.socket is None:
                raise self.error(f"{where}.socket", "", "must be set: the socket is the tenant's identity")
            if tenant.name in names:
                raise self.error(f"{where}.name", tenant.name, "must differ from the other tenants' names")
            if tenant.socket.absolute() in sockets:
                raise self.error(
                    f"{where}.socket", tenant.socket, "must differ from the other tenants' sockets"
                )
            if len(os.fsencode(tenant.socket.absolute())) > SOCKET_PATH_BYTES_MAX:
                limit = f"must be at most {SOCKET_PATH_BYTES_MAX} bytes long; choose a shorter directory"
                raise self.error(f"{where}.socket", tenant.socket, limit)
            if holders.intersection(tenant.certificate_names):
                limit = "must differ from the other tenants' names in certificates"
                raise self.error(f"{where}.certificate_names", ", ".join(tenant.certificate_names), limit)
            holders.update(tenant.certificate_names)
            self._check_quotas(tenant)
            names.add(tenant.name)
            sockets.add(tenant.socket.absolute())

    def _check_quotas(self, tenant: TenantConfig) -> None:
        quotas = (
            ("quota", tenant.quota_bytes, self.segment_bytes),
            ("hbm_quota", tenant.hbm_quota_bytes, self.hbm.segment_bytes),
            ("nvme_quota", tenant.nvme_quota_bytes, self.nvme.segment_bytes),
        )
        for key, quota_bytes, segment_bytes in quotas:
            if quota_bytes != AUTO_BYTES and quota_bytes < segment_bytes:
                limit = f"must be at least one segment of the tier, {format_size(segment_bytes)}"
                raise self.error(f"tenants[{tenant.name}].{key}", format_size(quota_bytes), limit)

    def error(self, key: str, value: object, limit: str) -> ConfigError:
        """The ConfigError of one key."""
        return config_error(self.origin.get(key, "configuration"), key, value, limit)


def config_error(origin: str, key: str, value: object, limit: str) -> ConfigError:
    """A ConfigError that names where, what and the remedy."""
    shown = str(value)
    shown = shown if len(shown) <= SHOWN_LENGTH_MAX else shown[: SHOWN_LENGTH_MAX - 3] + "..."
    message = f"{origin}: {key} = {shown}: {limit}. Change it and check with `prefixd config check`."
    return ConfigError("CONFIG_INVALID", message, origin=origin, key=key, value=shown, limit=limit)


def is_loopback(host_port: str) -> bool:
    """Whether HOST:PORT names this machine alone."""
    host = host_port.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def default_socket_path() -> Path:
    """Where the daemon listens and the CLI looks when nothing is configured.

    Raises:
        ConfigError: not root, and no $XDG_RUNTIME_DIR.
    """
    if os.geteuid() == 0:
        return Path("/run/prefixd/prefixd.sock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise config_error(
            "environment", "socket", "", "must be given, since XDG_RUNTIME_DIR is not set; use --socket"
        )
    return Path(runtime) / "prefixd" / "prefixd.sock"


SECTIONS: tuple[str, ...] = tuple(
    item.name for item in fields(Config) if item.name not in {"server", "tenants", "origin"}
)
"""Names of the sections with a heading of their own, in order."""


def section_type(name: str) -> type[Any]:
    """The dataclass of a section."""
    return type(getattr(Config(), name))
