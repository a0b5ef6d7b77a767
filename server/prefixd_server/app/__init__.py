"""Builds the daemon and its command line."""

import os

# Read when gRPC is first imported. The only child is a fresh program, so gRPC need not make forks safe, and
# must not log that it cannot.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
