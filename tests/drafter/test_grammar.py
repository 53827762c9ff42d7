"""A drafter asks for masks behind several paths of one session at once: its trunk's and its branches'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from outrider.engine.tokenizer import load_tokenizer
from outrider.grammar import Grammars, Mask, Place

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "demo" / "models" / "target"
GRAMMAR = LLMatcher.grammar_from_regex("[a-z ]{1,4000}[0-9]+")


def found(place: Place, path: list[int]) -> Mask:
    (allowed,) = place.masks(path, last=1)
    mask = allowed()
    assert mask is not None
    return mask


def test_masks_of_several_paths_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.grammar.COSTLY_SECONDS", 60.0)  # beyond which the rest is not found
    files = load_tokenizer(TARGET)
    ids = Tokenizer.from_str(files.json).encode("some words that go on for a while and on").ids
    grammars = Grammars(files.json, [0])
    paths = [ids[:count] for count in (1, 4, 8)]
    alone = grammars.place(GRAMMAR, (), lambda: None)
    expected = [found(alone, path) for path in paths]
    place = grammars.place(GRAMMAR, (), lambda: None)
    for _ in range(300):
        several = [place.masks(path, last=1) for path in paths]
        for (allowed,), mask in zip(several, expected, strict=True):
            at_once = allowed()
            assert at_once is not None and np.array_equal(at_once, mask)
    assert place.fault is None
