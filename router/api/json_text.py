"""What is told, as JSON. The encoder holds the interpreter for as long as it runs, in a thread too: for half
a million log-probabilities a second and more. So a long answer is encoded in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pydantic_core

T = TypeVar("T")


class Made(Sequence[Any]):
    """A list whose items are made when they are asked for, from what takes far less memory."""

    def __init__(self, items: Sequence[T], made: Callable[[T], Any]) -> None:
        self._items, self._made = items, made

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._made(one) for one in self._items[index]]
        return self._made(self._items[index])


def after(first: object, others: Sequence[object]) -> Made:
    """Returns a list of the first and the others."""
    return Made(range(1 + len(others)), lambda index: others[index - 1] if index else first)


TOGETHER = 16  # items of a list that are encoded in one call
BATCH = 2**16  # characters, about, that are written together
FEW = 4  # of a list, whose items are taken apart
CHOICES = 128  # of a list near the top: a request's answers


def to_json(body: object) -> str:
    return pydantic_core.to_json(body, fallback=list).decode()


def to_long_json(body: object) -> str:
    """Returns what `to_json` returns, and lets other threads run meanwhile."""
    return "".join(_pieces(body, 0))


def long_json(told: Callable[[], object]) -> Iterator[bytes]:
    """Yields the same of what is told, in parts, each made when it is asked for."""
    batch, size = list[str](), 0
    for piece in _pieces(told(), 0):
        batch.append(piece)
        size += len(piece)
        if size >= BATCH:
            yield "".join(batch).encode()
            batch, size = [], 0
    if batch:
        yield "".join(batch).encode()


def _pieces(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, dict):
        before = "{"
        for name, part in value.items():
            yield f"{before}{to_json(str(name))}:"
            yield from _pieces(part, depth + 1)
            before = ","
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple | Made):
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
