"""The prefixd client library: what an engine imports."""

from __future__ import annotations

from .async_client import AsyncClient, AsyncNamespace
from .async_leases import AsyncReadLease, AsyncWriteLease
from .client import Client, Namespace
from .errors import (
    CallerError,
    ClientClosed,
    DaemonRefused,
    ForkedError,
    InvalidArgument,
    PrefixdClientError,
)
from .leases import ReadLease, WriteLease
from .namespace import ChecksumAlgorithm, KvGroup, NamespaceSpec
from .options import ClientOptions
from .tls import ClientTls
from .values import (
    ClientStatus,
    Committed,
    DeclineReason,
    PrefetchStatus,
    PutResult,
    RequestPhase,
    ReserveOutcome,
    RunHits,
    StopReason,
    Tier,
    UsageReport,
)
from .version import __version__

__all__ = [
    "AsyncClient",
    "AsyncNamespace",
    "AsyncReadLease",
    "AsyncWriteLease",
    "CallerError",
    "ChecksumAlgorithm",
    "Client",
    "ClientClosed",
    "ClientOptions",
    "ClientStatus",
    "ClientTls",
    "Committed",
    "DaemonRefused",
    "DeclineReason",
    "ForkedError",
    "InvalidArgument",
    "KvGroup",
    "Namespace",
    "NamespaceSpec",
    "PrefetchStatus",
    "PrefixdClientError",
    "PutResult",
    "ReadLease",
    "RequestPhase",
    "ReserveOutcome",
    "RunHits",
    "StopReason",
    "Tier",
    "UsageReport",
    "WriteLease",
    "__version__",
]
