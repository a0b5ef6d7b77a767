"""The daemon's configuration: frozen dataclasses, one per component.

Each default says why it is what it is; the sample file and
docs/configuration.md are generated from here. How files, variables and flags
are read is told in config_sources.py. A field named `size_bytes` is written
`size` outside; the fields of ServerConfig have no section of their own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.options import (
    AUTO_BYTES,
    address,
    choice,
    flag,
    mode,
    number,
    option,
    path,
    paths,
    seconds,
    size,
    text,
    whole,
    whole_list,
)
from prefixd_server.base.sizes import format_size

MIB = 1 << 20
SEGMENT_ALIGNMENT_BYTES = 2 * MIB
SOCKET_PATH_BYTES_MAX = 103
"""A unix socket's path has at most 107 bytes, and the companion adds ".fd"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the daemon listens, what it owns on disk."""

    socket: Path | None = option(
        None,
        path(),
        "Unix socket of the first tenant. Empty: /run/prefixd/prefixd.sock for root, else "
        "$XDG_RUNTIME_DIR/prefixd/prefixd.sock, where engines look for it too.",
    )
    socket_mode: int = option(
        0o660,
        mode(),
        "Permission bits of that socket: the owner and one group, since the socket is the identity.",
    )
    socket_group: str = option("", text(), "Group of that socket; empty keeps the daemon's own group.")
    tenant: str = option(
        "default",
        text(max_length=64, allow_empty=False),
        "Name of the first tenant; most nodes have no other.",
    )
    listen: str = option(
        "",
        address(),
        "TCP address of the first tenant for remote-style clients (Put and Get only). Off, since whoever "
        "reaches a port is not known; loopback only.",
    )
    metrics: str = option(
        "", address(), "HTTP address of the Prometheus endpoint, path /metrics. Off until a scraper is there."
    )
    data_dir: Path | None = option(
        None,
        path(),
        "Directory for what outlives the daemon. Empty: nothing does, and a restart begins with new epochs.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A further tenant: its name, its socket, its rights."""

    name: str = option("", text(max_length=64, allow_empty=False), "Name in logs and metrics.")
    socket: Path | None = option(None, path(), "Its unix socket; whoever may open it is this tenant.")
    mode: int = option(0o660, mode(), "Permission bits of the socket.")
    group: str = option("", text(), "Group of the socket; empty keeps the daemon's own group.")
    admin: bool = option(
        False,
        flag(),
        "Whether calls that concern the whole daemon (Drain, Check, all statistics) are allowed.",
    )
    quota_bytes: int = option(
        AUTO_BYTES,
        size("2MiB", "64TiB", auto=True),
        'Most DRAM that the tenant may hold; "auto" lets it use whatever others leave.',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DramConfig:
    """The host memory tier."""

    size_bytes: int = option(
        512 * MIB,
        size("2MiB", "64TiB"),
        "Host memory for blocks. Small enough to start anywhere; give what you have.",
    )
    segment_bytes: int = option(
        AUTO_BYTES,
        size("2MiB", "16GiB", auto=True),
        "Bytes of one segment, a multiple of 2 MiB; a block must fit into one. Automatic: a 32nd of the "
        "size, 16 to 256 MiB: enough segments to share among block sizes and tenants, few enough to map.",
    )
    huge_pages: str = option(
        "auto",
        choice("auto", "off", "hugetlb"),
        '"auto" asks for transparent huge pages where the kernel allows them; "hugetlb" needs pages that '
        "were set aside.",
    )
    numa_nodes: tuple[int, ...] = option(
        (), whole_list(0, 1023), "NUMA nodes to bind the memory to. Empty: the kernel decides."
    )
    prefault: bool = option(
        True,
        flag(),
        "Touch the memory in the background after start: the first write to a page costs ten times more.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeConfig:
    """The NVMe tier."""

    size_bytes: int = option(
        AUTO_BYTES,
        size("32MiB", "1024TiB", auto=True, word="off"),
        "Most disk space of the tier, index and preallocation included. Off: disk is the operator's to give.",
    )
    directories: tuple[Path, ...] = option(
        (),
        paths(),
        "Where segment files lie, one directory a device; the index is in the first. Empty: data_dir/nvme.",
    )
    segment_bytes: int = option(
        256 * MIB, size("2MiB", "16GiB"), "Bytes of one segment file: large enough for sequential writes."
    )
    write_budget_bytes: int = option(
        AUTO_BYTES,
        size("1MiB", "1024TiB", auto=True, word="none"),
        "Most bytes written in 24 hours, so that a drive lives as long as it was bought for.",
    )
    retry_pause_s: float = option(
        1.0,
        seconds(0.05, 600),
        "How long the tier stays paused after a disk or index fault before it is tried again.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Bounds on leases and sessions, each per tenant."""

    ttl_max_s: float = option(
        30.0,
        seconds(0.05, 3600),
        "Longest lease. Engines renew by heartbeat; a hung one holds slots this long.",
    )
    heartbeat_interval_s: float = option(
        5.0, seconds(0.01, 600), "How often clients renew: a few times within the longest lease."
    )
    session_count_max: int = option(
        1024, whole(1, 65_536), "Sessions at a time: a node has far fewer engine processes."
    )
    lease_count_max: int = option(
        65_536, whole(1, 4_194_304), "Leases at a time: more than any scheduler has requests in flight."
    )
    quarantine_share_max: float = option(
        0.25,
        number(0.0, 1.0, "a share"),
        "Part of the tier that slots of dead writers may hold before the tenant's Reserve is declined.",
    )
    waiting_children_max: int = option(
        65_536,
        whole(0, 4_194_304),
        "Committed blocks that may wait for an ancestor that is still being written.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogConfig:
    """Bounds on metadata."""

    block_count_max: int = option(
        10_000_000,
        whole(1024, 64_000_000),
        "Blocks known at a time; 160 bytes of memory each, touched when used.",
    )
    namespace_count_max: int = option(
        1024,
        whole(1, 65_536),
        "Namespaces per tenant: a node serves few models, and a caller must not exhaust memory.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverConfig:
    """The threads that copy and verify bytes."""

    thread_count: int = option(
        2, whole(1, 64), "Mover threads. They share memory bandwidth with the engines: two keep a link busy."
    )
    queue_limit: int = option(
        256, whole(1, 65_536), "Jobs waiting at a time; beyond it callers are told to retry."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """How the daemon goes."""

    timeout_s: float = option(
        10.0,
        seconds(0, 3600),
        "How long SIGTERM waits for leases to end. Shorter than the usual 30 s of a supervisor.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What the daemon says, on standard error."""

    format: str = option(
        "json", choice("json", "console"), "One JSON object a line for machines, or text for people."
    )
    level: str = option(
        "info", choice("debug", "info", "warning", "error"), "Least severity that is written."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything. Make one with `checked()`; what it returns is complete and consistent."""

    server: ServerConfig = ServerConfig()
    tenants: tuple[TenantConfig, ...] = ()
    dram: DramConfig = DramConfig()
    nvme: NvmeConfig = NvmeConfig()
    leases: LeaseConfig = LeaseConfig()
    catalog: CatalogConfig = CatalogConfig()
    movers: MoverConfig = MoverConfig()
    drain: DrainConfig = DrainConfig()
    log: LogConfig = LogConfig()
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
        )
        return (first, *self.tenants)

    def checked(self) -> Config:
        """This configuration, after every check that spans keys.

        Raises:
            ConfigError: names the origin, key, value, limit and remedy.
        """
        self._check_sizes()
        self._check_tenants()
        for key, value in (("listen", self.server.listen), ("metrics", self.server.metrics)):
            if value and not is_loopback(value):
                raise self.error(key, value, "must be a loopback address: there is no TLS to protect it")
        return self

    def _check_sizes(self) -> None:
        segment = self.dram.segment_bytes
        if segment % SEGMENT_ALIGNMENT_BYTES:
            raise self.error("dram.segment", format_size(segment), "must be a multiple of 2MiB")
        if self.nvme.segment_bytes % SEGMENT_ALIGNMENT_BYTES:
            size_text = format_size(self.nvme.segment_bytes)
            raise self.error("nvme.segment", size_text, "must be a multiple of 2MiB")
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
            names.add(tenant.name)
            sockets.add(tenant.socket.absolute())

    def error(self, key: str, value: object, limit: str) -> ConfigError:
        """The ConfigError of one key."""
        return config_error(self.origin.get(key, "configuration"), key, value, limit)


def config_error(origin: str, key: str, value: object, limit: str) -> ConfigError:
    """A ConfigError that names where, what and the remedy."""
    message = f"{origin}: {key} = {value!s}: {limit}. Change it and check with `prefixd config check`."
    return ConfigError("CONFIG_INVALID", message, origin=origin, key=key, value=value, limit=limit)


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
