"""Where and how a process logs: lines on stderr, of text or of JSON, whoever writes them."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from outrider.log_record import keep_to_lines
from outrider.options.telemetry import Logging

ROOMS = ("outrider", "router", "verifier", "drafter", "deploy")  # whose loggers are ours
FIGURES = "figures"  # of a record: what is told beside its message


def utc(seconds: float) -> str:
    """Returns an instant of Unix time as lines of JSON have it."""
    at = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return at.replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE`, and the figures after it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        told = "".join(f" {name}={_whole(str(value))}" for name, value in figures_of(record).items())
        return super().formatMessage(record) + told


def _whole(value: str) -> str:
    """Returns the value, in quotes if it could be taken for further figures: clients have a part in some."""
    return json.dumps(value, ensure_ascii=False) if any(one in value for one in ' "=') else value


class JsonFormatter(logging.Formatter):
    """An object a line: time (ISO 8601, UTC), level, logger, message; the figures; a trace as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **figures_of(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            told["exception"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def figures_of(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, FIGURES, {})
    return found


def tell(log: logging.Logger, level: int, message: str, figures: Mapping[str, Any]) -> None:
    """Logs a message with figures, by name; those that are None are left out."""
    if log.isEnabledFor(level):
        log.log(level, message, extra={FIGURES: {key: it for key, it in figures.items() if it is not None}})


_in_force = Logging()


def in_force() -> Logging:
    """Returns how this process logs, as others of its kind are to."""
    return _in_force


def log_to_stderr(told: Logging) -> None:
    """Logs to stderr from now on. Others' code is heard from warnings on: what it logs below may hold what
    was asked."""
    global _in_force
    _in_force = told
    keep_to_lines()
    handler = logging.StreamHandler(sys.__stderr__)  # which Ray Serve does not put into lines of its own
    handler.setFormatter(JsonFormatter() if told.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or each stranger's handshake would be a line
    for room in ROOMS:
        logging.getLogger(room).setLevel(told.log_level.upper())
    logging.captureWarnings(True)


def take_over() -> None:
    """Lets libraries that were imported since, and would write to stderr by themselves, write as all others
    do. From which level on they are heard stays theirs."""
    known = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    for logger in known:
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.stdout):
                logger.removeHandler(handler)
                logger.propagate = True
