"""Sizes of memory as people write them."""

from __future__ import annotations

import math
import re

from outrider.options.option import wrong

MEMORY_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_memory(text: str, name: str = "kv_memory") -> int:
    """Returns the bytes in a size such as 512MiB, 2G or 1073741824. K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise wrong(name, f"must be a size such as 512MiB or 2GiB, not {text[:40]!r}")
    return int(float(found[1]) * MEMORY_UNITS[found[2].upper()])


def memory_text(count: float) -> str:
    """Returns so many bytes as parse_memory reads them, such as 1.5GiB: a little less rather than more."""
    fitting = [unit for unit, size in MEMORY_UNITS.items() if count >= size] or [""]
    unit, size = fitting[-1], MEMORY_UNITS[fitting[-1]]
    return f"{math.floor(count / size * 10) / 10:g}{unit and unit + 'i'}B"
