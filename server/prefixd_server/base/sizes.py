"""Sizes as people write them: "512MiB", "64GiB", "4096"."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "ki": 1 << 10,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mi": 1 << 20,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gi": 1 << 30,
    "gib": 1 << 30,
    "t": 1 << 40,
    "ti": 1 << 40,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as "512MiB", "1.5 GiB", "64G" (binary) or "10GB" (decimal).

    Raises:
        ValueError: not a size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError('must be a size such as "512MiB" or "64GiB"')
    whole, _, fraction = match.group(1).partition(".")
    scaled = int(whole + fraction) * unit
    size, rest = divmod(scaled, int(10 ** len(fraction)))
    if rest:
        raise ValueError("must be a whole number of bytes")
    return size


def format_size(size_bytes: int) -> str:
    """The shortest exact form: "512MiB", "1GiB", "4097"."""
    for suffix, unit in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    return str(size_bytes)


def human_size(size_bytes: int) -> str:
    """A readable form of three digits or four for tables: "1.5 GiB"; not exact."""
    value = float(size_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if suffix == "B" else f"{_digits(value)} {suffix}"
        value /= 1024
    return f"{_digits(value)} TiB"


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
