"""A speculator that learns: it begins with its target's output layer, and reads its states and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distillation.measuring import acceptance, median_ms
from distillation.speculator_learning import SpeculatorLearner, begun, states_of_guesses
from distillation.student import Load
from distillation.texts import Lesson, States
from outrider.engine import speculator as checkpoint
from outrider.engine.engine import Engine
from outrider.engine.speculator import Shape, Speculator
from outrider.errors import StartupError
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, rank

MEASURED_STATES = 1024  # whose size its output layer begins with


class SpeculatorInMaking:
    """A student: see there."""

    keeps_vocabulary = True  # its output layer learns, unlike that of a draft
    _speculator: Speculator
    _vocabulary: torch.Tensor

    def __init__(self, target: Any) -> None:
        """Raises StartupError for a target that can have none."""
        self._embeddings = target.get_input_embeddings().weight.detach().float()
        self._output = target.get_output_embeddings().weight.detach()
        self.width = self._output.shape[1]
        if (embedded := self._embeddings.shape[1]) != self.width:
            raise StartupError(
                f"{type(target).__name__} has embeddings of {embedded} numbers and states of {self.width}, "
                "which a speculator cannot read: leave out --speculator, and a draft is made"
            )

    def begin(
        self, vocabulary: torch.Tensor, lessons: Sequence[Lesson], seed: int, readings: int
    ) -> SpeculatorLearner:
        shape = Shape(self.width, inner_size(self.width), len(vocabulary))
        states = torch.from_numpy(_some(lessons))
        self._vocabulary = vocabulary
        self._speculator = begun(shape, self._output[vocabulary.cpu()], states, seed).to(vocabulary.device)
        self._embeddings = self._embeddings.to(vocabulary.device)
        return SpeculatorLearner(self._speculator, self._embeddings, vocabulary, lessons, seed, readings)

    def acceptance(self, heldout: Sequence[Lesson]) -> dict[str, Any]:
        self._speculator.eval()
        ks = range(1, self._speculator.shape.guesses + 1)
        return acceptance(((each.text, self._right(each)) for each in heldout), ks)

    def save(self, folder: Path) -> None:
        self._speculator.to("cpu")
        checkpoint.save(self._speculator, self._vocabulary.tolist(), folder)

    def figures(self, folder: Path, target: Engine, load: Load) -> dict[str, Any]:
        guesses = self._speculator.shape.guesses
        return {
            "guesses": guesses,
            "inner_size": self._speculator.shape.inner_size,
            "guess_ms": guess_ms(target, folder, guesses) if target.on_cpu else None,
        }

    @torch.no_grad()
    def _right(self, lesson: Lesson) -> list[int]:
        """Returns how many guesses behind each place of a text are right before one is wrong, each drawn with
        the noise by which the target drew its token."""
        text, device = lesson.text, self._vocabulary.device
        guesses, count = self._speculator.shape.guesses, text.written - 1
        if not count:
            return []
        ids = torch.tensor([*text.ids[text.prompt :], *[0] * guesses])
        states = torch.from_numpy(lesson.states[:count].copy()).to(device).float()
        right, alive = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.bool)
        params = SamplingParams(temperature=text.temperature, seed=text.seed)
        tokens = ids.unfold(0, guesses, 1)[:count].to(device)
        for at, own in enumerate(states_of_guesses(self._speculator, self._embeddings, states, tokens)):
            about = range(at + 1, at + 1 + count)  # places among those written; the last are beyond the text
            rows = [Row(params, text.prompt + place, None, ()) for place in about]
            ranked = rank(self._speculator.logits(own).cpu().float(), rows, 1, None, self._vocabulary.cpu())
            drawn = torch.tensor([one.ids[0] for one in ranked])
            alive &= (drawn == ids[about.start : about.stop]) & (torch.arange(count) + at < count)
            right += alive
        return right.tolist()


def inner_size(hidden_size: int) -> int:
    """Returns the numbers inside: four thirds of the target's, in whole blocks of 64."""
    return -(-4 * hidden_size // (3 * 64)) * 64


def guess_ms(target: Engine, folder: Path, guesses: int) -> float:
    """Returns the time of a guess where it is served: of up to so many, one after another behind a token,
    the median."""
    speculating = checkpoint.load(folder, target.model)
    rows = [[Row(SamplingParams(temperature=0.0), at + 1, None, ())] for at in range(guesses)]
    target.probe()
    made = len(speculating.guess([0], [0], rows)[0])
    return round(median_ms(lambda: speculating.guess([0], [0], rows)) / made, 4)


def _some(lessons: Sequence[Lesson]) -> States:
    """Returns states of the first text."""
    found: States = lessons[0].states[:MEASURED_STATES].copy()
    return found
