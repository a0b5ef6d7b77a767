"""structlog, on standard error: one JSON object a line, or text for people.

Libraries that use the standard library's logging come out in the same form.
Prefix hashes, tokens and session ids are never logged whole: a log must not
let its reader use another's lease.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from prefixd_server.base.config import LogConfig

_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure_logging(config: LogConfig, stream: TextIO | None = None) -> None:
    """Sets up logging for the process, in place of any handlers that were there."""
    route_to_standard_library()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(config, handler.stream),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())


def route_to_standard_library() -> None:
    """Sends what is logged to the standard library's handlers, whatever those are."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _rendering(config: LogConfig, stream: TextIO) -> list[Processor]:
    if config.format == "console":
        # Plain tracebacks: richer ones show local variables, and tokens are among them.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(sort_keys=False)]


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger: `logger(__name__).info("event in words", key=value)`."""
    bound: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return bound
