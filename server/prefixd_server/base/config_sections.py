"""The sections of the daemon's configuration, one frozen dataclass a component.

Each default says why it is what it is. Put together and checked in config.py.
A field named `size_bytes` is written `size` outside; the fields of ServerConfig
have no section of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefixd_server.base.config_tenants import WHY_BEARERS, WHY_CERTIFICATES
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
    texts,
    whole,
    whole_list,
)

MIB = 1 << 20


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
    socket_group: str = option(
        "", text(), "Group of that socket, name or number; empty keeps the daemon's own."
    )
    tenant: str = option(
        "default",
        text(max_length=64, allow_empty=False),
        "Name of the first tenant; most nodes have no other.",
    )
    listen: str = option(
        "",
        address(),
        "TCP address for remote-style clients (Put and Get only). Off, since whoever reaches a port is not "
        "known; loopback only, unless by TLS from callers that show certificates (tls.client_ca) or tokens.",
    )
    metrics: str = option(
        "", address(), "HTTP address of the Prometheus endpoint, path /metrics. Off until a scraper is there."
    )
    metrics_exposed: bool = option(
        False,
        flag(),
        "Whether that address may be other than loopback. It tells whoever reaches it every tenant's "
        "counters: only where a network policy lets scrapers alone in.",
    )
    probes: str = option(
        "",
        address(),
        "TCP address of grpc.health.v1 alone, for an orchestrator's probes, which cannot reach a unix "
        "socket. It tells whether the daemon serves and nothing else, so any address will do.",
    )
    certificate_names: tuple[str, ...] = option((), texts(), WHY_CERTIFICATES)
    token_file: Path | None = option(None, path(), WHY_BEARERS)
    data_dir: Path | None = option(
        None,
        path(),
        "Directory for what outlives the daemon. Empty: nothing does, and a restart begins with new epochs.",
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
class HbmConfig:
    """The HBM tier: GPU memory that the daemon owns."""

    size_bytes: int = option(
        AUTO_BYTES,
        size("2MiB", "16TiB", auto=True, word="off"),
        "GPU memory of the tier, per device; the context costs some 500 MiB more. Off: engines want it too.",
    )
    segment_bytes: int = option(
        256 * MIB,
        size("2MiB", "16GiB"),
        "Bytes of one allocation. Engines open each once, so few large ones; it must divide hbm.size.",
    )
    device: str = option(
        "",
        text(),
        'UUID of the GPU ("GPU-...", see nvidia-smi -L), so that no numbering matters. Empty: the first one.',
    )
    devices: tuple[str, ...] = option(
        (),
        texts(),
        "UUIDs of the GPUs where the tier lies on several, hbm.size on each; instead of hbm.device.",
    )
    copy_timeout_s: float = option(
        10.0,
        seconds(0.05, 600),
        "A copy of one extent takes milliseconds; a device that needs longer has hung and is given up.",
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
    latency_max_s: float = option(
        1.0,
        seconds(0.01, 600),
        "A read, write or sync that takes longer pauses the tier: no healthy drive needs as long for 8 MiB, "
        "and recomputing is faster.",
    )
    retry_pause_s: float = option(
        1.0,
        seconds(0.05, 600),
        "How long the tier stays paused after a fault before its disk is probed; up to 60 times as long when "
        "probes fail.",
    )
    thread_count: int = option(
        2,
        whole(1, 64),
        "Threads that read and write it, apart from those for memory, which a slow disk must not hold up. "
        "Two keep a drive busy: each call is up to 8 MiB.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Bounds on leases and sessions, each per tenant."""

    ttl_max_s: float = option(
        30.0,
        seconds(0.05, 3600),
        "Longest lease. Engines renew by heartbeat; a hung one, or a Get that nobody reads, holds slots this "
        "long.",
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
class PolicyConfig:
    """What stays where."""

    name: str = option(
        "importance",
        choice("importance", "lru"),
        "Which blocks go first: those that are least likely to be needed soon, as learned from the requests, "
        "or those unused for longest. Can be switched while the daemon runs; what is learned stays.",
    )
    recompute_cost: bool = option(
        False,
        flag(),
        "Weigh importance by what a block's last copy saves: time to compute it again, which grows with its "
        "place in the prompt. Off: as many tokens hit as can be; on, fewer do and long prompts gain.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationConfig:
    """Copies between tiers ahead of need, and how they keep out of the engines' way."""

    background_share: float = option(
        0.5,
        number(0.01, 1.0, "a share"),
        "Part of a link's measured rate that background copies may take while engines use it; an idle link "
        "is lent whole.",
    )
    decode_p99_target_s: float = option(
        0.0,
        seconds(0, 60),
        "99th percentile of the time per output token that engines report, above which background copies "
        "give way. 0: whatever it is; only the operator knows what was promised.",
    )
    conservative: str = option(
        "auto",
        choice("auto", "on", "off"),
        "Conservative mode, in which only demand and needed evictions go on: begun and ended by what is "
        "measured, or always, or never. Can be switched while the daemon runs.",
    )
    high_water: float = option(
        0.875,
        number(0.05, 1.0, "a share"),
        "Part of DRAM in use above which copies are made in NVMe of what would go next.",
    )
    low_water: float = option(
        0.85,
        number(0.0, 1.0, "a share"),
        "Part of DRAM down to which what would go next is to have its copy in NVMe; below high_water.",
    )
    promotion_window_s: float = option(
        10.0,
        seconds(0.1, 3600),
        "What is expected to be used twice within this time is brought to DRAM beyond what was asked for.",
    )
    prefetch_count_max: int = option(
        1024, whole(1, 65_536), "Prefetches of a tenant at a time: more than a scheduler has in its queue."
    )
    prefetch_share_max: float = option(
        0.25,
        number(0.0, 0.9, "a share"),
        "Part of DRAM that blocks may hold which wait for the request they were brought for.",
    )
    prefetch_hold_max_s: float = option(
        30.0,
        seconds(0.05, 3600),
        "How long they are held at most: a request that waits longer is not about to run.",
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
class TlsConfig:
    """TLS of the TCP address; PEM files, read again when they change. Unix sockets need none."""

    certificate: Path | None = option(
        None, path(), "The daemon's certificate and its chain. Empty: no TLS, and loopback only."
    )
    key: Path | None = option(
        None, path(), "The certificate's private key; no other user may be able to read it."
    )
    client_ca: Path | None = option(
        None,
        path(),
        "Authorities whose certificates callers must show (mutual TLS). Without them callers must "
        "show tokens, or the address must be loopback, since anybody could call.",
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
