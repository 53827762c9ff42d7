"""A draft learns its target's distribution on the target's own text, each text at the temperature of its own.

First the divergence, whose gradient is strong where the draft is far off; then the total variation too, which
is what bounds the acceptance under shared noise (Daliri et al., Coupling without Communication, 2024).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from distillation.folder import Folder
from distillation.losses import distance
from distillation.schedule import Schedule, optimisers
from distillation.texts import Likely, Text
from distillation.writing import GREEDY_TEMPERATURE

TEXTS_A_STEP = 8
MOST_TOKENS = 4096  # that the draft reads at a time, if they are of several texts
SAVED_STEPS = 20  # a kill loses at most so many
RATE = 1e-3
WARMUP = 10
VARIATION_FROM = 0.3  # share of the steps after which the total variation counts
Lesson = tuple[Text, Likely]


class Learner:
    """Trains a draft in place, whose logits are of the `vocabulary` [K], on the device where that is."""

    def __init__(
        self, draft: Any, vocabulary: torch.Tensor, lessons: Sequence[Lesson], seed: int, readings: int
    ) -> None:
        self._draft, self._vocabulary = draft, vocabulary
        whole = draft.get_input_embeddings().weight.shape[0]
        self._places = torch.full((whole,), len(vocabulary), device=vocabulary.device)
        self._places[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
        self._batches = [batch for reading in range(readings) for batch in _batches(lessons, seed + reading)]
        self.steps = len(self._batches)
        self._schedule = Schedule(optimisers(draft, RATE, RATE), draft, self.steps, WARMUP)

    @property
    def taken(self) -> int:
        return self._schedule.taken

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on from what `save` wrote."""
        self._draft.load_state_dict(saved["learned"], strict=False)
        for opt, state in zip(self._schedule.opts, saved["opts"], strict=True):
            opt.load_state_dict(state)
        self._schedule.taken = saved["taken"]

    def save(self, folder: Folder, round: int) -> None:
        learned = {name: value for name, value in self._draft.named_parameters() if value.requires_grad}
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
        self._draft.train()
        while self.taken < self.steps:
            loss = self._step(self._batches[self.taken])
            left = until - time.monotonic()
            self._schedule.least_done = 1 - left / seconds if seconds < float("inf") else 0.0
            tell(self.taken, f"loss {loss:.3f}")
            if left <= 0:
                break
            if self.taken % SAVED_STEPS == 0:
                saved()
        saved()

    def _step(self, lessons: Sequence[Lesson]) -> float:
        tokens = sum(text.written for text, _ in lessons)
        variation = float(self.taken >= VARIATION_FROM * self.steps)
        total = 0.0
        for some in _together(lessons):
            learned, wanted = self._distributions(some)
            loss = distance(learned, wanted, variation) * len(wanted) / tokens
            torch.autograd.backward([loss])
            total += float(loss.detach())
        self._schedule.step()
        return total

    def _distributions(self, lessons: Sequence[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the draft's logits [n, K] where the target wrote, at each text's temperature, and the
        target's probabilities there, of the tokens that were kept."""
        texts = [text for text, _ in lessons]
        device = self._vocabulary.device
        # what fills a text up stands behind it: nothing sees it
        padded = pad_sequence([torch.tensor(text.ids[:-1]) for text in texts], batch_first=True).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = self._draft(input_ids=padded, use_cache=False).logits
        learned = torch.cat(
            [
                row[text.prompt - 1 : len(text.ids) - 1] / (text.temperature or GREEDY_TEMPERATURE)
                for row, text in zip(logits.float(), texts, strict=True)
            ]
        )
        kept = np.concatenate([likely for _, likely in lessons])
        ids = torch.from_numpy(kept["ids"].astype(np.int64)).to(device)
        probabilities = torch.from_numpy(kept["probabilities"].astype(np.float32)).to(device)
        wanted = torch.zeros(len(learned), len(self._vocabulary) + 1, device=device)
        wanted.scatter_add_(1, self._places[ids], probabilities)
        return learned, wanted[:, :-1]  # what the draft cannot guess is left out


def _together(lessons: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """Yields the texts in groups of MOST_TOKENS at most, filled up to the longest of each, or of one text."""
    group = list[Lesson]()
    for lesson in sorted(lessons, key=lambda lesson: len(lesson[0].ids)):
        if group and (len(group) + 1) * len(lesson[0].ids) > MOST_TOKENS:
            yield group
            group = []
        group.append(lesson)
    yield group


def _batches(lessons: Sequence[Lesson], seed: int) -> list[list[Lesson]]:
    order = random.Random(seed).sample(list(lessons), len(lessons))
    return [order[first : first + TEXTS_A_STEP] for first in range(0, len(order), TEXTS_A_STEP)]
