"""A draft learns its target's distribution on the target's own text, each text at the temperature of its own.

First the divergence, whose gradient is strong where the draft is far off; then the total variation too, which
is what bounds the acceptance under shared noise (Daliri et al., Coupling without Communication, 2024).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from distillation.losses import distance
from distillation.schedule import optimisers
from distillation.steps import Steps
from distillation.texts import Lesson
from distillation.writing import GREEDY_TEMPERATURE

TEXTS_A_STEP = 8
MOST_TOKENS = 4096  # that the draft reads at a time, if they are of several texts
SAVED_STEPS = 20  # a kill loses at most so many
RATE = 1e-3
WARMUP = 10


class Learner(Steps[list[Lesson]]):
    """Trains a draft."""

    saved_steps = SAVED_STEPS

    def __init__(
        self, draft: Any, vocabulary: torch.Tensor, lessons: Sequence[Lesson], seed: int, readings: int
    ) -> None:
        batches = [batch for reading in range(readings) for batch in _batches(lessons, seed + reading)]
        vocab_size = draft.get_input_embeddings().weight.shape[0]
        super().__init__(draft, vocabulary, vocab_size, batches, optimisers(draft, RATE, RATE), WARMUP)

    def _step(self, lessons: Sequence[Lesson]) -> float:
        tokens, variation, total = sum(each.text.written for each in lessons), self._variation, 0.0
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
        texts = [each.text for each in lessons]
        device = self._vocabulary.device
        # what fills a text up stands behind it: nothing sees it
        padded = pad_sequence([torch.tensor(text.ids[:-1]) for text in texts], batch_first=True).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = self._model(input_ids=padded, use_cache=False).logits
        learned = torch.cat(
            [
                row[text.prompt - 1 : len(text.ids) - 1] / (text.temperature or GREEDY_TEMPERATURE)
                for row, text in zip(logits.float(), texts, strict=True)
            ]
        )
        return learned, self._wanted(np.concatenate([each.likely for each in lessons]))


def _together(lessons: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """Yields the texts in groups of MOST_TOKENS at most, filled up to the longest of each, or of one text."""
    group = list[Lesson]()
    for lesson in sorted(lessons, key=lambda lesson: len(lesson.text.ids)):
        if group and (len(group) + 1) * len(lesson.text.ids) > MOST_TOKENS:
            yield group
            group = []
        group.append(lesson)
    yield group


def _batches(lessons: Sequence[Lesson], seed: int) -> list[list[Lesson]]:
    order = random.Random(seed).sample(list(lessons), len(lessons))
    return [order[first : first + TEXTS_A_STEP] for first in range(0, len(order), TEXTS_A_STEP)]
