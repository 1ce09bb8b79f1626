"""Structured logs: JSON for machines, coloured lines for a terminal; request_id, tenant and worker_id travel along."""

from __future__ import annotations

import json
import logging
import sys

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


_encode = json.JSONEncoder(default=repr).encode  # made once: json.dumps would make one for every line


def _to_json(event: structlog.typing.EventDict, **_: object) -> str:
    return _encode(event)


def setup_logging(level: str, log_format: str, *, program: str) -> None:
    """Configures structlog for the process: `level` and `log_format` as in Settings, to standard error.

    Whatever is bound with `structlog.contextvars` (request_id, tenant, worker_id) is in every line of its task.
    """
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())

    def add_program(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["program"] = program
        return event

    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_program,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if is_json:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)]
    else:
        # The rich traceback would show local variables, and so prompts.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        processors.append(renderer)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
