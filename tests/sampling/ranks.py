"""Threads that stand for the ranks of a group, each with its slice of the vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from outrider.sampling.sampler import Row
from outrider.sampling.vocab_parallel import choose_vocab_parallel, vocab_parallel


class Meeting:
    """Threads that stand for ranks: each hands in a tensor and gets those of all."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=120)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def gather(self, rank: int, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._parts[rank] = part
        self._barrier.wait()
        everyones = tuple(self._parts)
        self._barrier.wait()
        return everyones


def chosen(logits: torch.Tensor, rows: Sequence[Row], size: int, allowed: int) -> list[list[int]]:
    """What each of so many ranks finds, each with its slice of the ids below `allowed`."""
    meeting = Meeting(size)
    width = -(-logits.shape[1] // size)

    def rank(index: int) -> list[int]:
        own = logits[:, :allowed][:, index * width : (index + 1) * width]
        found = choose_vocab_parallel(
            own,
            [vocab_parallel(row) for row in rows],
            index * width,
            lambda part: meeting.gather(index, part),
        )
        return found.tolist()  # type: ignore[no-any-return]

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))
