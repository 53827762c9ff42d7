"""Ctrl-C while there is nothing to end yet, or nothing any more: the process is gone, without a trace."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def end_at_once() -> None:
    """From now on SIGINT ends the process, as the system does it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """SIGINT ends the process while modules are imported and a service is made, where KeyboardInterrupt could
    come out of any line of anybody's code. asyncio leaves it so until somebody asks it for signals."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # it is ignored, or somebody else's
        yield
        return
    end_at_once()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
