"""What is told, as JSON. The encoder holds the interpreter for as long as it runs, in a thread too: for half
a million log-probabilities a second and more. So a long answer is encoded in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps makes one at each call

TOGETHER = 16  # items of a list that are encoded in one call
FEW = 4  # of a list, whose items are taken apart
CHOICES = 128  # of a list near the top: a request's answers


def to_json(body: object) -> str:
    return _ENCODER.encode(body)


def to_long_json(body: object) -> str:
    """Returns what `to_json` returns, and lets other threads run meanwhile."""
    return "".join(_pieces(body, 0))


def _pieces(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, dict):
        before = "{"
        for name, part in value.items():
            yield f"{before}{to_json(str(name))}:"
            yield from _pieces(part, depth + 1)
            before = ","
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple):
        few = len(value) <= (CHOICES if depth == 1 else FEW)
        before = "["
        for start in range(0, len(value), 1 if few else TOGETHER):
            yield before
            if few:
                yield from _pieces(value[start], depth + 1)
            else:
                yield to_json(value[start : start + TOGETHER])[1:-1]
            before = ","
        yield "]" if value else "[]"
    else:
        yield to_json(value)
