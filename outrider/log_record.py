"""A line of the log stays one, whoever had a part in its words: peers' reasons stand there."""

from __future__ import annotations

import logging

from outrider.errors import printable

MAX_LINE = 2000  # characters


class LogRecord(logging.LogRecord):
    """In whichever process and format it is written."""

    def getMessage(self) -> str:
        return printable(super().getMessage(), MAX_LINE)


def keep_to_lines() -> None:
    """Holds from now on for all that this process logs."""
    logging.setLogRecordFactory(LogRecord)
