"""Requests that are asked again and again: on a machine of any speed some are under way when a test acts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    begun: float  # time.monotonic()
    ended: float
    answer: T


@contextmanager
def asking_on(asks: Sequence[Callable[[], T]]) -> Iterator[list[list[Answered[T]]]]:
    """Asks each on a thread of its own until the context ends. Yields the answers of each, which are complete
    after it. Raises what an ask raised."""
    answers: list[list[Answered[T]]] = [[] for _ in asks]
    enough = threading.Event()

    def ask_on(ask: Callable[[], T], into: list[Answered[T]]) -> None:
        while not enough.is_set():
            begun = time.monotonic()
            answer = ask()
            into.append(Answered(begun, time.monotonic(), answer))

    with ThreadPoolExecutor(len(asks)) as pool:
        asking = [pool.submit(ask_on, ask, into) for ask, into in zip(asks, answers, strict=True)]
        try:
            yield answers
        finally:
            enough.set()
        for each in asking:
            each.result()


def under_way(answers: Sequence[Sequence[Answered[T]]], at: float) -> bool:
    """Returns whether one was under way at that time."""
    return any(one.begun < at < one.ended for each in answers for one in each)
