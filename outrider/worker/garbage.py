"""Decides what Python's garbage collector looks at, and when, while a process starts and serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 20_000  # objects that came and have not gone, at which a short round begins


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
    meanwhile: 60 to 230 ms each if torch is loaded, a few a minute under load. Short rounds come more rarely
    than by default: a step of many sessions makes thousands of objects, and nearly all go by themselves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def spare_newcomers() -> None:
    """Spares what is there without a full round before, for a process that serves already: garbage that a
    short round does not find is kept for good. To be called a few times in a process's life."""
    gc.collect(1)
    gc.freeze()
