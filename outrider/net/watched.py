"""The content of files, read again when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
Signature = tuple[
    tuple[int, int, int] | None, ...
]  # of each file: inode, size, time of change in ns; None = gone


class Watched(Generic[T]):
    """Holds the content of some files. Asking for it costs a stat of each file. Any thread may ask.

    If the files cannot be used (half written, damaged, gone), that is logged once and the former content
    stays.
    """

    def __init__(self, what: str, files: Sequence[Path], read: Callable[[], T]) -> None:
        """`what` names the files in logs. `read` returns their content or raises OSError or ValueError,
        which then comes from here too."""
        self._what = what
        self._files = files
        self._read = read
        self._lock = Lock()
        self._looked_at = self._signature()
        self._content = read()

    def current(self) -> T:
        """Returns the content that is in force now."""
        with self._lock:
            now = self._signature()
            if now == self._looked_at:
                return self._content
            try:
                content = self._read()
            except (OSError, ValueError) as error:
                log.error(
                    "%s changed and cannot be used (%s); what they held before stays in force",
                    self._what,
                    reason(error),
                )
                self._looked_at = now
                return self._content
            if self._signature() != now:
                return self._content  # being written: who asks next looks again
            self._looked_at, self._content = now, content
            log.info("%s changed and are in force", self._what)
            return content

    def _signature(self) -> Signature:
        return tuple(_stat(file) for file in self._files)


def reason(error: OSError | ValueError) -> str:
    """Returns why a file cannot be used, in words for people. It quotes nothing of the content."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {(error.strerror or 'cannot be read').lower()}"
    return str(error)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
