"""What Python's garbage collector looks at while a process serves."""

from __future__ import annotations

import gc


def spare_what_is_there() -> None:
    """What a process made before it serves (modules above all) lasts as long as it does.

    The collector's full rounds would go through all of that again and again, and nothing else runs meanwhile:
    60 to 230 ms each where torch is loaded, a few a minute under load. So they pass it over from now on.
    """
    gc.collect()
    gc.freeze()
