"""The version that this client tells the daemon."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    """Of the installed distribution; "0.0.0" when the package is used from a bare source tree."""
    try:
        return metadata.version("prefixd")
    except metadata.PackageNotFoundError:
        return "0.0.0"


__version__ = _installed()
