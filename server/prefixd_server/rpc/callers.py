"""Who calls on the TCP address: by certificate, by token, or by both.

On a unix socket the socket is the identity, and nobody is asked. A certificate
names a tenant by its subject alternative names, or by its common name where it
has none. A token comes as `authorization: Bearer ...` with every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixd_server.base.config import TenantConfig
from prefixd_server.base.errors import Unauthenticated
from prefixd_server.rpc.tokens import TokenBook

TOKEN_KEY = "authorization"  # noqa: S105 - the name of the metadata, no secret
SCHEME = "bearer "


class Callers:
    """Tells the tenant of each call.

    Args:
        tenants: as configured, the first one first. Where none of them has a certificate's
            name or a token, everybody that the address lets in is the first.

    Raises:
        ConfigError: TOKENS_UNUSABLE.
    """

    def __init__(self, tenants: Sequence[TenantConfig]) -> None:
        self._by_name = {name: tenant.name for tenant in tenants for name in tenant.certificate_names}
        self._tokens = TokenBook(
            {tenant.name: tenant.token_file for tenant in tenants if tenant.token_file is not None}
        )
        known = any(tenant.certificate_names or tenant.token_file for tenant in tenants)
        self._anybody = None if known else tenants[0].name

    def tenant_of(self, call: Any) -> str:
        """The caller's tenant.

        Raises:
            Unauthenticated: CREDENTIALS_MISSING, TOKEN_UNKNOWN or CREDENTIALS_DISAGREE.
        """
        if self._anybody is not None:
            return self._anybody
        found = self._of_certificate(call) | self._of_token(call)
        if not found:
            raise Unauthenticated(
                "CREDENTIALS_MISSING",
                "the call shows no tenant's token or certificate; send metadata `authorization: Bearer "
                "TOKEN`, or show a certificate whose name the daemon knows",
            )
        if len(found) > 1:
            raise Unauthenticated(
                "CREDENTIALS_DISAGREE", "certificate and token are of different tenants; show those of one"
            )
        return found.pop()

    def _of_certificate(self, call: Any) -> set[str]:
        """Tenants that the verified certificate names; none without TLS or without a certificate."""
        if not self._by_name:
            return set()
        names = {identity.decode("utf-8", "replace") for identity in call.peer_identities() or ()}
        return {self._by_name[name] for name in names & self._by_name.keys()}

    def _of_token(self, call: Any) -> set[str]:
        given = [value for key, value in call.invocation_metadata() or () if key == TOKEN_KEY]
        if not given:
            return set()
        value = given[0] if isinstance(given[0], str) else ""
        known = value[: len(SCHEME)].lower() == SCHEME
        tenant = self._tokens.tenant_of(value[len(SCHEME) :].strip()) if known and len(given) == 1 else None
        if tenant is None:
            raise Unauthenticated(
                "TOKEN_UNKNOWN", "this token is no tenant's; send one that is in a tenant's token_file"
            )
        return {tenant}
