"""Bearer tokens of tenants: files that only the daemon may read, one token a line.

A token is a secret like a key: of at least 32 characters, never logged, kept as
its digest, compared in a time that does not depend on it. Files are read again
when they have changed, so that tokens are given and taken without a restart;
files that cannot be used then are told in the log, and what was in force stays.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.logs import logger

TOKEN_LENGTH_MIN = 32
"""As long as 128 bits are in hexadecimal: nobody guesses one, so guesses need not be slowed down."""
TOKEN_LENGTH_MAX = 512
TOKEN_COUNT_MAX = 16
"""Of one tenant: the one in force, the next one, and some."""
FILE_BYTES_MAX = 16 << 10
OPEN_TO_OTHERS = 0o077


class TokenBook:
    """Which token is whose.

    Args:
        files: of each tenant that has one.

    Raises:
        ConfigError: TOKENS_UNUSABLE.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)
        self._states: dict[Path, tuple[int, ...]] = {}
        self._digests: list[tuple[bytes, str]] = []
        self._load()

    def tenant_of(self, token: str) -> str | None:
        """Whose token it is; None for nobody's."""
        self._renew()
        given = _digest(token)
        found = None
        for digest, tenant in self._digests:
            # Every one is compared, and wholly: the time tells nothing.
            if hmac.compare_digest(digest, given):
                found = tenant
        return found

    def _renew(self) -> None:
        states = {path: _state(path) for path in self._files.values()}
        if states == self._states:
            return
        try:
            self._load()
        except ConfigError as error:
            # Told once for each state of the files.
            self._states = states
            logger("prefixd.tokens").error(
                "the new tokens cannot be used", reason=error.reason, detail=error.message
            )

    def _load(self) -> None:
        states = {path: _state(path) for path in self._files.values()}
        owners: dict[bytes, str] = {}
        for tenant, path in self._files.items():
            for token in _tokens(path):
                if owners.setdefault(_digest(token), tenant) != tenant:
                    raise _unusable(path, f"it has a token that is also of tenant {owners[_digest(token)]!r}")
        self._digests = list(owners.items())
        self._states = states


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError as error:
        return (error.errno or -1,)
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode


def _tokens(path: Path) -> list[str]:
    """The file's tokens. What is checked is what is read: the file is opened once."""
    try:
        # Not to wait where somebody has put a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise _unusable(path, "it is not a regular file")
            if found.st_mode & OPEN_TO_OTHERS:
                raise _unusable(path, "others than its owner may open it; chmod 0600 it")
            if found.st_uid not in {0, os.geteuid()}:
                raise _unusable(path, "it belongs to another user; chown it to the daemon's")
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unusable(path, f"{error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise _unusable(path, f"it has more than {FILE_BYTES_MAX:,} bytes")
    tokens = [line.strip() for line in content.decode("latin-1").splitlines() if line.strip()]
    if not 1 <= len(tokens) <= TOKEN_COUNT_MAX:
        raise _unusable(path, f"it must have 1 to {TOKEN_COUNT_MAX} tokens, one a line")
    if not all(_is_token(token) for token in tokens):
        raise _unusable(
            path,
            f"a token has {TOKEN_LENGTH_MIN} to {TOKEN_LENGTH_MAX} printable ASCII characters and no space; "
            "`openssl rand -hex 32` makes one",
        )
    return tokens


def _is_token(text: str) -> bool:
    return TOKEN_LENGTH_MIN <= len(text) <= TOKEN_LENGTH_MAX and all("!" <= letter <= "~" for letter in text)


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError("TOKENS_UNUSABLE", f"token_file = {path} cannot be used: {why}", path=path)
