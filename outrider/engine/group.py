"""The group part of an engine: the processes that its model is divided among, as one of them sees it.

Here the group of one process alone; rank_group.py has the other.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from outrider.engine.step_inputs import Work
from outrider.engine.step_message import Kind, Words
from outrider.sampling.sampler import draw
from outrider.sampling.vocab_parallel import Draws


class Group(Protocol):
    """What the processes do together in a step, and around it. All make the same calls in the same order."""

    @property
    def size(self) -> int: ...

    @property
    def ids(self) -> slice:
        """Returns the token ids whose logits this process draws from."""
        ...

    def part(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns [R, len(ids)] of what the model gave here, which may be the whole."""
        ...

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns [R, V] of what the model, or `part`, gave here."""
        ...

    def greatest(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the greatest number of each whole row, given such parts: [R]."""
        ...

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the id of the greatest number of each whole row, the lowest of equals, given such parts:
        [R] int64."""
        ...

    def everyones(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns all processes' numbers [n, N], given this one's [n]."""
        ...

    def choose(self, logits: torch.Tensor, draws: Draws) -> list[int]:
        """Returns a token for each row of what the model gave; only the process that has the rows draws
        all."""
        ...

    def keep_from_compiler(self) -> None:
        """From now on torch's compiler does not look into what the processes do together."""
        ...

    def agree(self, flag: bool) -> bool:
        """Returns whether it is true of every process."""
        ...

    def least(self, number: int) -> int:
        """Returns the least of every process's."""
        ...

    def encode(self, works: Sequence[Work]) -> Words | None:
        """Returns what the other processes have to be told of a step, as far as it is known before it
        runs."""
        ...

    def step(
        self, kind: Kind, works: Words | None, draws: Draws | None = None
    ) -> AbstractContextManager[object]:
        """Returns a context within which a step runs, one at a time, in all processes. `works` come from
        `encode`."""
        ...

    async def serve(self, steps: Coroutine[Any, Any, None]) -> None:
        """Runs a loop of steps until it fails, or the group does; raises why."""
        ...

    def close(self) -> None:
        """Leaves the group."""
        ...


class Alone:
    """Implements Group for a model that is not divided."""

    size = 1

    def __init__(self, vocab_size: int) -> None:
        self.ids = slice(0, vocab_size)
        self._stepping = threading.Lock()  # a probe may come while a step runs

    def part(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def greatest(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.amax(-1)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def everyones(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers[:, None]

    def choose(self, logits: torch.Tensor, draws: Draws) -> list[int]:
        return draw(logits, draws.rows, draws.vocab_size).tolist() if draws.rows else []

    def keep_from_compiler(self) -> None:
        """There is nothing."""

    def agree(self, flag: bool) -> bool:
        return flag

    def least(self, number: int) -> int:
        return number

    def encode(self, works: Sequence[Work]) -> None:
        return None

    def step(
        self, kind: Kind, works: Words | None, draws: Draws | None = None
    ) -> AbstractContextManager[object]:
        return self._stepping

    async def serve(self, steps: Coroutine[Any, Any, None]) -> None:
        await steps

    def close(self) -> None:
        """There is nobody to leave."""
