"""The namespaces that one process of an engine has opened: its own, and one for each adapter."""

from __future__ import annotations

from prefixd_client.client import Client, Namespace
from prefixd_client.namespace import NamespaceSpec


class Namespaces:
    """Opens each namespace once. Any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._opened: dict[NamespaceSpec, Namespace] = {}

    def use(self, client: Client) -> None:
        """Another client from now on; what was opened is opened again."""
        self._client, self._opened = client, {}

    def open(self, spec: NamespaceSpec) -> Namespace:
        """The namespace; asks the daemon the first time, so not for the scheduler's thread.

        Raises DaemonRefused when the daemon does not serve such a namespace.
        """
        found = self._opened.get(spec)
        if found is None:
            found = self._opened.setdefault(spec, self._client.namespace(spec))
        return found
