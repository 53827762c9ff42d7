"""The steps by which a model learns from its target's text: what drafts and speculators have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from distillation.folder import Folder
from distillation.schedule import Schedule
from distillation.texts import Likely

VARIATION_FROM = 0.3  # share of the steps after which the total variation counts
B = TypeVar("B")


class Steps(ABC, Generic[B]):
    """Trains a model in place, whose logits are of the `vocabulary` [K], on the device where that is: a step
    for each of some batches."""

    saved_steps: ClassVar[int]  # a kill loses at most so many

    def __init__(
        self,
        model: nn.Module,
        vocabulary: torch.Tensor,
        vocab_size: int,
        batches: Sequence[B],
        opts: Sequence[Optimizer],
        warmup: int,
    ) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._places = torch.full((vocab_size,), len(vocabulary), device=vocabulary.device)
        self._places[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
        self._batches = batches
        self.steps = len(batches)
        self._schedule = Schedule(opts, model, self.steps, warmup)

    @property
    def taken(self) -> int:
        return self._schedule.taken

    def load(self, saved: dict[str, Any]) -> None:
        """Begins with what was learned, in another round too."""
        self._model.load_state_dict(saved["learned"], strict=False)

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on from what `save` wrote."""
        self.load(saved)
        for opt, state in zip(self._schedule.opts, saved["opts"], strict=True):
            opt.load_state_dict(state)
        self._schedule.taken = saved["taken"]

    def save(self, folder: Folder, round: int) -> None:
        learned = {name: value for name, value in self._model.named_parameters() if value.requires_grad}
        opts = [opt.state_dict() for opt in self._schedule.opts]
        vocabulary = self._vocabulary.tolist()
        folder.save_training(
            {"round": round, "taken": self.taken, "learned": learned, "opts": opts, "vocabulary": vocabulary}
        )

    def run(
        self, until: float, seconds: float, saved: Callable[[], None], tell: Callable[[int, str], None]
    ) -> None:
        """Takes the steps that are left, or those that `seconds` from now on allow: then until the clock is
        at `until` the rate falls as if all had been taken. `saved` is called now and then, and at the end."""
        self._model.train()
        while self.taken < self.steps:
            loss = self._step(self._batches[self.taken])
            left = until - time.monotonic()
            self._schedule.least_done = 1 - left / seconds if seconds < float("inf") else 0.0
            tell(self.taken, f"loss {loss:.3f}")
            if left <= 0:
                break
            if self.taken % self.saved_steps == 0:
                saved()
        saved()

    @abstractmethod
    def _step(self, batch: B) -> float:
        """Learns from a batch, and returns the loss."""

    @property
    def _variation(self) -> float:
        """Returns what the total variation weighs in the next step."""
        return float(self.taken >= VARIATION_FROM * self.steps)

    def _wanted(self, kept: Likely) -> torch.Tensor:
        """Returns the target's probabilities [n, K] at some places, of the tokens that were kept."""
        device = self._vocabulary.device
        ids = torch.from_numpy(kept["ids"].astype(np.int64)).to(device)
        probabilities = torch.from_numpy(kept["probabilities"].astype(np.float32)).to(device)
        wanted = torch.zeros(len(kept), len(self._vocabulary) + 1, device=device)
        wanted.scatter_add_(1, self._places[ids], probabilities)
        return wanted[:, :-1]  # what the model cannot guess is left out
