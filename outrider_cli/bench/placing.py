"""Decides on which cores a process computes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import StartupError


@dataclass(frozen=True, slots=True)
class Cores:
    """Who computes where. At least one core each; as many threads as cores."""

    target: tuple[int, ...] = (0,)
    draft: tuple[int, ...] = (1,)  # of the draft model; the client and the line stay here too
    router: tuple[int, ...] | None = None  # None = the draft model's
    pinned: bool = True  # False = the numbers of cores count, and the system chooses which

    @classmethod
    def divided(cls, available: Sequence[int]) -> Cores:
        """Returns half of the cores for each model, at least one; a single core is shared."""
        half = max(1, len(available) // 2)
        return cls(tuple(available[:half]), tuple(available[half:]) or tuple(available))

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted({*self.target, *self.draft}))

    def prefix(self, cores: Sequence[int]) -> tuple[str, ...]:
        """Returns what a command line begins with, so that it stays on these of them."""
        return ("taskset", "--cpu-list", ",".join(map(str, cores))) if self.pinned else ()


def stay_on(cores: Sequence[int]) -> None:
    """Keeps this process to some cores. Raises StartupError if that cannot be."""
    if not hasattr(os, "sched_setaffinity") or shutil.which("taskset") is None:
        raise StartupError("processes cannot be kept to cores on this system: say --cores any")
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        named = ",".join(map(str, cores))
        raise StartupError(
            f"this process may not use the cores {named}: name others, or say --cores any"
        ) from None
