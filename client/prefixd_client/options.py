"""What can be tuned about a client. Each default says why."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .errors import InvalidArgument
from .tls import ClientTls


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Deadlines, pauses and bounds. Times are seconds and positive."""

    lookup_timeout_s: float = 0.045
    """Lookup, Acquire, Redeem, and a segment that is mapped at its first use: the engine waits for these; a
    hung daemon costs it this once. It has its answer within 50 ms: gRPC and Python take 2 to 4 ms to notice
    that the time is over."""
    write_timeout_s: float = 0.5
    """Reserve and Commit: off the way to the first token, yet an engine thread waits."""
    control_timeout_s: float = 2.0
    """OpenNamespace, Release, Abort, ReportUsage, heartbeats: nobody but the background thread waits."""
    stream_timeout_s: float = 60.0
    """Put and Get, whole: bytes travel through gRPC at 0.1 GB/s."""
    open_wait_s: float = 2.0
    """Longest wait of Client() for its first session; a daemon that is not there is noticed sooner."""
    probe_pause_min_s: float = 0.05
    """First pause between two attempts to reach a lost daemon."""
    probe_pause_max_s: float = 2.0
    """Pauses double up to this."""
    answer_patience_s: float = 10.0
    """A session whose heartbeat is unanswered for so long is given up and opened anew."""
    release_batch_pause_s: float = 0.02
    """Releases that come within this time travel together; a read slot that waits so long blocks nobody."""
    release_queue_limit: int = 65_536
    """Releases waiting to be sent; the oldest are dropped beyond it, and their leases expire."""
    usage_queue_limit: int = 4_096
    """Usage reports waiting to be sent; the oldest are dropped beyond it."""
    message_bytes_max: int = 16 << 20
    """Largest message received; the daemon's own bound is the same."""
    device_uuid: str = ""
    """GPU of this process, "GPU-..." as nvidia-smi -L prints it: blocks that the daemon keeps there are read
    from there. Empty: HBM is not used."""
    redeemer_devices: tuple[str, ...] = ()
    """GPUs of the processes that redeem this one's leases: what these leases hold may lie there. This process
    does not open them."""
    tls: ClientTls | None = None
    """How to reach a "host:port" by TLS; None speaks plainly, which daemons allow on loopback alone."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and value <= 0:
                raise InvalidArgument(item.name, value, "must be above 0", "see ClientOptions")
