"""A line of the log stays one, whoever had a part in its words: peers' reasons stand there."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from outrider.errors import printable

MAX_LINE = 2000  # characters
FRAME = '  File "'  # so begins what a trace says of one place in the code


class LogRecord(logging.LogRecord):
    """A record, in whichever process and format it is written. Each error of a trace has one line."""

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        if self.exc_info and self.exc_info[1] is not None:
            self.exc_text = _trace(self.exc_info[1])  # which formatters take in place of their own

    def getMessage(self) -> str:
        return printable(super().getMessage(), MAX_LINE)


def _trace(error: BaseException) -> str:
    lines: list[str] = []
    for part in traceback.TracebackException.from_exception(error).format():
        if part.startswith(FRAME):
            lines += part.rstrip("\n").split("\n")
        else:
            lines += [printable(part.strip("\n"), MAX_LINE)]
    return "\n".join(lines)


def keep_to_lines() -> None:
    """Holds from now on for all that this process logs."""
    logging.setLogRecordFactory(LogRecord)
