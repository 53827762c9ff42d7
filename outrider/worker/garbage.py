"""Decides what Python's garbage collector looks at, and when, while a process starts and serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spared_imports() -> Iterator[None]:
    """Lets the collector rest while modules are imported, and pass over them from then on.

    Torch and transformers make some hundred thousand objects, all of which last. The rounds that they cause
    would take a fifth of the time in which a worker starts."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def spare_what_is_there() -> None:
    """Lets the collector pass over all that exists now. What a process makes before it serves (modules above
    all) lasts as long as the process.

    Otherwise the collector's full rounds go through all of that again and again, and nothing else runs
    meanwhile: 60 to 230 ms each if torch is loaded, a few a minute under load.
    """
    gc.collect()
    gc.freeze()


def spare_newcomers() -> None:
    """The same without a full round before, for a process that serves already: what is garbage now, beyond
    what a short round finds, is kept for good. To be called a few times in a process's life."""
    gc.collect(1)
    gc.freeze()
