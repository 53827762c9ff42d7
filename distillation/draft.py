"""A draft that learns: cut from its target, and reduced to the tokens that it guesses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distillation.cut import cut, freeze, save
from distillation.learning import Learner
from distillation.measuring import acceptance, matches, runs, step_ms
from distillation.student import Load
from distillation.texts import Lesson
from outrider.engine.draft_vocabulary import reduce_output
from outrider.engine.engine import Engine


class Draft:
    """A student: see there."""

    width = 0
    keeps_vocabulary = False

    def __init__(self, target: Any, layers: Sequence[int], tokenizer: Any, slim: bool) -> None:
        self._model = cut(target, layers)
        self._layers, self._tokenizer, self._slim = list(layers), tokenizer, slim

    def begin(self, vocabulary: torch.Tensor, lessons: Sequence[Lesson], seed: int, readings: int) -> Learner:
        freeze(self._model)
        self._vocabulary, self._whole = vocabulary, self._model.get_output_embeddings()
        reduce_output(self._model, vocabulary.cpu())
        self._model.to(vocabulary.device)
        return Learner(self._model, vocabulary, lessons, seed, readings)

    def acceptance(self, heldout: Sequence[Lesson]) -> dict[str, Any]:
        self._model.eval()
        texts = [each.text for each in heldout]
        return acceptance((text, runs(matches(self._model, text, self._vocabulary))) for text in texts)

    def save(self, folder: Path) -> None:
        self._model.to("cpu").set_output_embeddings(self._whole)
        save(self._model, self._tokenizer, self._vocabulary.tolist(), folder, self._slim)

    def figures(self, folder: Path, target: Engine, load: Load) -> dict[str, Any]:
        return {"layers": self._layers, "draft_token_ms": step_ms(load(str(folder)))}
