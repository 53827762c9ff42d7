"""What learns from a target's text: a draft model, or a speculator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from distillation.steps import Steps
from distillation.texts import Lesson
from outrider.engine.engine import Engine

Load = Callable[[str], Engine]  # of a draft's checkpoint


class Student(Protocol):
    """A model in the making."""

    width: int  # of the states that it learns from; 0 = it learns from the text alone
    keeps_vocabulary: bool  # that of its first round, in all

    def begin(
        self, vocabulary: torch.Tensor, lessons: Sequence[Lesson], seed: int, readings: int
    ) -> Steps[Any]:
        """Returns the steps in which it learns to guess the `vocabulary` [K], on the device of that. Called
        once, before all that follows."""
        ...

    def acceptance(self, heldout: Sequence[Lesson]) -> dict[str, Any]:
        """Returns how often it guesses rightly, as measuring.acceptance does."""
        ...

    def save(self, folder: Path) -> None:
        """Writes its checkpoint."""
        ...

    def figures(self, folder: Path, target: Engine, load: Load) -> dict[str, Any]:
        """Returns what the report says of it alone, once it is saved."""
        ...
