"""A speculator learns its target's distribution at the next places of a text, from the state at one of them.

A guess is trained as a target that takes all guesses before it would have it made: it reads the text's own
tokens, and its own states.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from distillation.losses import distance
from distillation.steps import Steps
from distillation.texts import Lesson, Likely
from distillation.writing import GREEDY_TEMPERATURE
from outrider.engine.speculator import Shape, Speculator

PLACES = 512  # of a batch
RUN = 64  # places of it that follow each other, at most: they stand together on the disk
SAVED_STEPS = 200  # a kill loses at most so many
RATE = 1e-3
WARMUP, WARMUP_SHARE = 50, 0.1  # steps, and the most of them of all
FARTHER = 0.8  # what a guess counts, as a share of the one before it


class Places(NamedTuple):
    """Places of a text that follow each other, from `first` to before `end`."""

    lesson: Lesson
    first: int
    end: int


class SpeculatorLearner(Steps[list[Places]]):
    """Trains a speculator."""

    saved_steps = SAVED_STEPS

    def __init__(
        self,
        speculator: Speculator,
        embeddings: torch.Tensor,
        vocabulary: torch.Tensor,
        lessons: Sequence[Lesson],
        seed: int,
        readings: int,
    ) -> None:
        """`embeddings` [V, H]: of the target's input."""
        batches = [batch for reading in range(readings) for batch in _batches(lessons, seed + reading)]
        opt = torch.optim.AdamW(speculator.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        warmup = max(1, min(WARMUP, round(WARMUP_SHARE * len(batches))))
        super().__init__(speculator, vocabulary, len(embeddings), batches, [opt], warmup)
        self._speculator, self._embeddings = speculator, embeddings

    def _step(self, batch: list[Places]) -> float:
        guesses, device = self._speculator.shape.guesses, self._vocabulary.device
        tokens, known, likely = (
            np.concatenate(parts) for parts in zip(*(_ahead(some, guesses) for some in batch), strict=True)
        )
        there = torch.from_numpy(known).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=_multiplies_halves(device)):
            owns = states_of_guesses(
                self._speculator,
                self._embeddings,
                _states(batch, device),
                torch.from_numpy(tokens).to(device),
            )
            logits = [self._speculator.logits(own[there[:, at]]) for at, own in enumerate(owns)]
        temperatures = torch.tensor(
            [some.lesson.text.temperature or GREEDY_TEMPERATURE for some in batch], device=device
        ).repeat_interleave(torch.tensor([some.end - some.first for some in batch], device=device))
        loss = torch.zeros((), device=device)
        for at, each in enumerate(logits):
            if len(each):
                scaled = each.float() / temperatures[there[:, at], None]
                wanted = self._wanted(likely[known[:, at], at])
                loss = loss + FARTHER**at * distance(scaled, wanted, self._variation)
        torch.autograd.backward([loss])
        self._schedule.step()
        return float(loss.detach())


def begun(shape: Shape, output: torch.Tensor, states: torch.Tensor, seed: int) -> Speculator:
    """Returns a speculator that knows nothing yet but `output` [K, H], the target's output layer, which reads
    states such as these [n, H]. Its own states are normed: so its output layer is of their size."""
    generator = torch.Generator().manual_seed(seed)
    speculator = Speculator(shape)
    same = torch.eye(shape.hidden_size)
    with torch.no_grad():
        for layer, begins, spread in (
            (speculator.state, same, 0.01),
            (speculator.own, 0.3 * same, 0.02),
            (speculator.token, 0.0, 0.02),
            (speculator.gate_proj, 0.0, 0.03),
            (speculator.up_proj, 0.0, 0.03),
        ):
            noise = torch.randn(layer.weight.shape, generator=generator)
            layer.weight.copy_(spread * noise + begins)
        speculator.down_proj.weight.zero_()
        speculator.head.weight.copy_(output.float() * states.float().square().mean().sqrt())
    return speculator


def states_of_guesses(
    speculator: Speculator, embeddings: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yields its states [R, H] at each guess behind R places, from the target's states [R, H] there and the
    tokens [R, guesses] that each guess in turn reads."""
    own = speculator.begin(states)
    for column in tokens.T:
        own = speculator.follow(own, F.embedding(column, embeddings))
        yield own


def _states(batch: Sequence[Places], device: torch.device) -> torch.Tensor:
    kept = np.concatenate([some.lesson.states[some.first : some.end] for some in batch])
    return torch.from_numpy(kept).to(device).float()


def _ahead(some: Places, guesses: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], Likely]:
    """Returns what stands ahead of each place, [n, guesses] each: the token that a guess reads, whether the
    place that it is about is in the text, and what was likely there."""
    text = some.lesson.text
    at = np.arange(some.first, some.end)[:, None] + np.arange(guesses)
    last = text.written - 1
    tokens = np.array(text.ids[text.prompt :], np.int64)[np.minimum(at, last)]
    likely = some.lesson.likely[some.first + 1 : some.end + guesses]
    return tokens, at < last, likely[np.minimum(at + 1, last) - some.first - 1]


def _batches(lessons: Sequence[Lesson], seed: int) -> list[list[Places]]:
    """Returns all places behind which there is a token to guess, in runs, in another order for each seed."""
    pieces = [
        Places(lesson, first, min(first + RUN, lesson.text.written - 1))
        for lesson in lessons
        for first in range(0, lesson.text.written - 1, RUN)
    ]
    random.Random(seed).shuffle(pieces)
    batches, room = list[list[Places]](), 0
    for some in pieces:
        if room <= 0:
            batches.append([])
            room = PLACES
        batches[-1].append(some)
        room -= some.end - some.first
    return batches


def _multiplies_halves(device: torch.device) -> bool:
    """Returns whether the processor multiplies numbers of 16 bits faster than those of 32."""
    return device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
