"""Sizes of memory as people write them, and shares of what is free."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from outrider.options.option import wrong

MEMORY_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the memory that a device has free once the model is loaded."""

    percent: float  # above 0, to 100

    def __str__(self) -> str:
        return f"{self.percent:g}%"

    def of(self, count: float) -> int:
        """Returns the whole bytes of so many."""
        return int(max(count, 0) * self.percent / 100)


def parse_memory_or_share(text: str, name: str = "kv_memory") -> int | Share:
    """Returns the bytes in a size as parse_memory reads it, or a share such as 60%."""
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", text.strip())
    if not found:
        return parse_memory(text, name, " or a share such as 60%")
    if not 0 < float(found[1]) <= 100:
        raise wrong(name, f"must be a share above 0% and at most 100%, not {text[:40]}")
    return Share(float(found[1]))


def parse_memory(text: str, name: str = "kv_memory", otherwise: str = "") -> int:
    """Returns the bytes in a size such as 512MiB, 2G or 1073741824. K, M, G and T are powers of 1024.
    `otherwise`: what else it may be."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise wrong(name, f"must be a size such as 512MiB or 2GiB{otherwise}, not {text[:40]!r}")
    return int(float(found[1]) * MEMORY_UNITS[found[2].upper()])


def memory_text(count: float) -> str:
    """Returns so many bytes as parse_memory reads them, such as 1.5GiB: a little less rather than more."""
    fitting = [unit for unit, size in MEMORY_UNITS.items() if count >= size] or [""]
    unit, size = fitting[-1], MEMORY_UNITS[fitting[-1]]
    return f"{math.floor(count / size * 10) / 10:g}{unit and unit + 'i'}B"
