"""The prompts of requests, in a file of bounded size: for `outrider distill`, and only if somebody says so.

A thread writes it. What comes faster than that writes is left out: nobody who serves waits.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
from typing import Any

from outrider.errors import StartupError

MOST_BYTES = 2**26  # of the file and the one before it, together
MOST_WAITING = 256  # prompts

log = logging.getLogger(__name__)


class PromptRecord:
    """Belongs to a router."""

    def __init__(self, file: Path) -> None:
        """Raises StartupError if the file cannot be written."""
        try:
            handler = _File(file, maxBytes=MOST_BYTES // 2, backupCount=1, encoding="utf-8")
        except OSError as error:
            raise StartupError(f"--record {file} cannot be written ({error.strerror})") from None
        handler.setFormatter(_AsJson())
        self._handler = handler
        self._waiting: Queue[logging.LogRecord] = Queue(MOST_WAITING)
        self._writer = _Writer(self._waiting, handler)
        self._writer.start()
        self._last: Sequence[int] = ()

    def add(self, model: str, prompt: Sequence[int]) -> None:
        """Keeps a prompt, once if it comes several times in a row: one request may ask for many answers."""
        if prompt != self._last:
            self._last = prompt
            with suppress(Full):
                self._waiting.put_nowait(logging.makeLogRecord({"model": model, "ids": prompt}))

    def close(self) -> None:
        """Returns when what waits is written."""
        self._writer.stop()
        self._handler.close()


class _Writer(QueueListener):
    def enqueue_sentinel(self) -> None:
        self.queue.put(self._sentinel)  # type: ignore[attr-defined]  # its own raises Full where the queue is full


class _File(RotatingFileHandler):
    """Nobody but the user may read it: it has people's words."""

    _told = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None and not Path(self.baseFilename).exists():  # somebody has taken it away
            with suppress(OSError):  # what it still held had no room
                self.stream.close()
            self.stream = None  # the next write opens it
        super().emit(record)

    def _open(self) -> Any:
        return open(
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            opener=_opened,
        )

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            log.warning("prompts are not recorded in %s any more: it cannot be written", self.baseFilename)


def _opened(name: str, flags: int) -> int:
    """Opens a file as the user's alone, also one that is there."""
    opened = os.open(name, flags | os.O_NONBLOCK, 0o600)  # a pipe that nobody reads from would not open
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "it is no file that can be kept", name)
        os.fchmod(opened, 0o600)
    except OSError:
        os.close(opened)
        raise
    return opened


class _AsJson(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = vars(record)
        return json.dumps({"model": told["model"], "ids": list(told["ids"])})
