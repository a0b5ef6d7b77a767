"""One option of the configuration: its default, its reason, and how its text is read.

Knows forms of values (sizes, seconds, addresses ...), not what the options
are: those stand in config.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixd_server.base.sizes import format_size, parse_size

AUTO_BYTES = 0
"""A size of 0 stands for "auto": the daemon works it out."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one kind of value is read and shown.

    read: turns a TOML value, or the text of a flag or variable, into the
        option's value; raises ValueError with "must be ..." when it cannot.
    show: turns the option's value into TOML.
    """

    read: Callable[[object], Any]
    show: Callable[[Any], str]


def option(default: Any, form: Form, why: str) -> Any:
    """A dataclass field with its reason; lists are given as tuples."""
    return dataclasses.field(default=default, metadata={"form": form, "why": why})


def key_of(name: str) -> str:
    """The key of a field in files, flags and variables: `size_bytes` is written `size`."""
    return name.removesuffix("_bytes")


def _quoted(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)


def text(*, max_length: int = 255, allow_empty: bool = True) -> Form:
    """A short printable string."""

    def read(raw: object) -> str:
        if not isinstance(raw, str) or len(raw) > max_length or not raw.isprintable():
            raise ValueError(f"must be printable text of at most {max_length} characters")
        if not raw and not allow_empty:
            raise ValueError("must not be empty")
        return raw

    return Form(read, _quoted)


def path() -> Form:
    """A file system path; empty means none."""

    def read(raw: object) -> Path | None:
        if not isinstance(raw, str) or "\0" in raw:
            raise ValueError("must be a path")
        try:
            return Path(raw).expanduser() if raw else None
        except RuntimeError as error:
            raise ValueError("must be a path; nobody's home is known by this name") from error

    return Form(read, lambda value: _quoted(value or ""))


def _items(raw: object) -> object:
    """The items of a list; a text, of a variable or flag, is separated at its commas. Raises ValueError."""
    if not isinstance(raw, str):
        return raw
    if raw.lstrip().startswith("["):
        raise ValueError("must be separated by commas, without brackets")
    return [item.strip() for item in raw.split(",") if item.strip()]


def paths() -> Form:
    """A list of file system paths; text separates them by commas."""
    one = path()

    def read(raw: object) -> tuple[Path, ...]:
        raw = _items(raw)
        if isinstance(raw, (list, tuple)):
            return tuple(found for item in raw if (found := one.read(item)) is not None)
        raise ValueError("must be a list of paths")

    return Form(read, lambda value: "[" + ", ".join(map(_quoted, value)) + "]")


def texts(*, max_length: int = 255) -> Form:
    """A list of short printable strings; text separates them by commas."""
    one = text(max_length=max_length, allow_empty=False)

    def read(raw: object) -> tuple[str, ...]:
        raw = _items(raw)
        if isinstance(raw, (list, tuple)):
            return tuple(one.read(item) for item in raw)
        raise ValueError("must be a list of texts")

    return Form(read, lambda value: "[" + ", ".join(map(_quoted, value)) + "]")


def address() -> Form:
    """HOST:PORT, IPv6 in brackets; empty means none."""

    def read(raw: object) -> str:
        if raw == "":
            return ""
        host, colon, port = raw.rpartition(":") if isinstance(raw, str) else ("", "", "")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError('must be HOST:PORT such as "127.0.0.1:7301"')
        return f"{host}:{int(port)}"

    return Form(read, _quoted)


def choice(*names: str) -> Form:
    """One of a few words."""

    def read(raw: object) -> str:
        if raw not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return str(raw)

    return Form(read, _quoted)


def flag() -> Form:
    """true or false."""
    words = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }

    def read(raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in words:
            return words[raw.lower()]
        raise ValueError("must be true or false")

    return Form(read, lambda value: "true" if value else "false")


def whole(minimum: int, maximum: int) -> Form:
    """A whole number within its bounds."""
    limits = f"must be a whole number from {minimum:,} to {maximum:,}"

    def read(raw: object) -> int:
        if isinstance(raw, str) and raw.replace("_", "").isdecimal():
            raw = int(raw)
        if not isinstance(raw, int) or isinstance(raw, bool) or not minimum <= raw <= maximum:
            raise ValueError(limits)
        return raw

    return Form(read, lambda value: f"{value:_}")


def number(minimum: float, maximum: float, unit: str) -> Form:
    """A number within its bounds, in its unit."""
    limits = f"must be {unit} from {minimum:g} to {maximum:g}"

    def read(raw: object) -> float:
        try:
            value = float(raw) if isinstance(raw, (int, float, str)) and not isinstance(raw, bool) else None
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum:
            raise ValueError(limits)
        return value

    return Form(read, lambda value: f"{value:g}" if value % 1 else f"{value:.1f}")


def seconds(minimum: float, maximum: float) -> Form:
    """A time span in seconds."""
    return number(minimum, maximum, "seconds")


def size(minimum: str, maximum: str, *, auto: bool = False, word: str = "auto") -> Form:
    """Bytes: a whole number, or text such as "512MiB"; where `auto` allows it, a word for 0."""
    limits = f"must be a size from {minimum} to {maximum}" + (f' or "{word}"' if auto else "")

    def read(raw: object) -> int:
        if auto and raw in {word, AUTO_BYTES}:
            return AUTO_BYTES
        if isinstance(raw, str):
            raw = parse_size(raw)
        if isinstance(raw, int) and parse_size(minimum) <= raw <= parse_size(maximum):
            return int(raw)
        raise ValueError(limits)

    return Form(read, lambda value: _quoted(word if auto and value == AUTO_BYTES else format_size(value)))


def mode() -> Form:
    """Permission bits of a socket, as an octal string."""

    def read(raw: object) -> int:
        if not isinstance(raw, str) or not raw or set(raw) - set("01234567") or int(raw, 8) > 0o777:
            raise ValueError('must be an octal string such as "0660"')
        return int(raw, 8)

    return Form(read, lambda value: f'"{value:04o}"')


def whole_list(minimum: int, maximum: int) -> Form:
    """A list of whole numbers; text separates them by commas."""
    one = whole(minimum, maximum)

    def read(raw: object) -> tuple[int, ...]:
        raw = _items(raw)
        if isinstance(raw, (list, tuple)):
            return tuple(one.read(item) for item in raw)
        raise ValueError("must be a list of whole numbers")

    return Form(read, lambda value: "[" + ", ".join(map(str, value)) + "]")
