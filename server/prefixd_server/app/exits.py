"""What the command's exit status means; scripts may rely on it."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses of `prefixd`."""

    OK = 0
    FAILED = 1
    """The daemon refused the call, a check found problems, or leases were left after a drain."""
    USAGE = 2
    """A flag, argument or configuration value is wrong."""
    UNREACHABLE = 3
    """No daemon answers on the socket, or it did not answer in time."""
    ALREADY_RUNNING = 4
    """Another daemon holds the socket or the data directory."""
