"""base/logs.py."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from prefixd_server.base.config import LogConfig
from prefixd_server.base.logs import configure_logging, logger


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Puts pytest's own logging back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def written(config: LogConfig) -> io.StringIO:
    """Where everything goes from now on."""
    stream = io.StringIO()
    configure_logging(config, stream)
    return stream


def fails_with(secret: str) -> None:
    """Raises, with a local variable that nobody should see."""
    raise ValueError(secret[:3])


def test_json_is_one_object_a_line_also_for_libraries_and_tracebacks() -> None:
    stream = written(LogConfig())
    logger("prefixd.test").bind(tenant="a").info("stored", block_count=3)
    logging.getLogger("grpc").warning("from a %s", "library")
    logger("prefixd.test").error("failed", exc_info=ValueError("why"))
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["tenant"], first["block_count"], first["level"]) == (
        "stored",
        "a",
        3,
        "info",
    )
    assert (second["event"], second["logger"], second["level"]) == ("from a library", "grpc", "warning")
    assert "ValueError: why" in third["exception"]
    assert first["timestamp"].endswith("Z")


def test_the_console_form_is_text_without_colours_or_local_variables() -> None:
    stream = written(LogConfig(format="console"))
    logger("prefixd.test").info("stored", block_count=3)
    with pytest.raises(ValueError, match="tok") as caught:
        fails_with("token")
    logger("prefixd.test").error("failed", exc_info=caught.value)
    assert "stored" in stream.getvalue()
    assert "ValueError: tok\n" in stream.getvalue()
    assert "'token'" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_what_is_below_the_level_is_not_written() -> None:
    stream = written(LogConfig(level="warning"))
    logger("prefixd.test").info("quiet")
    logging.getLogger("grpc").info("quiet")
    assert stream.getvalue() == ""
