"""Server reflection that also finds methods, so that `grpcurl describe package.Service.Method` works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection

SERVICE_NAME: str = reflection.SERVICE_NAME


def serve_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds reflection to a server that has not started."""
    pool: Any = _MethodFindingPool()
    reflection.enable_server_reflection(service_names, server, pool=pool)


class _MethodFindingPool:
    """The default descriptor pool, which knows the file of a service but not that of its methods."""

    def __init__(self) -> None:
        self._pool: Any = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 - the pool's own name
        """See DescriptorPool. Raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return self._pool.FindServiceByName(service).methods_by_name[method].containing_service.file
