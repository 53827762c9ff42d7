"""Shortens what a model sees of a text, for the time of a check, so that a short one shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.engine import indexer

WINDOW = 23  # sliding windows and the like are shortened to it meanwhile, so that they take effect
REACHES = ("sliding_window", "attention_chunk_size", "floor_scale")  # attributes that tell of these


@contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Shortens every sliding window, chunk and step of a temperature, in the configuration and in the layers,
    for the time of the check."""
    owners = [*model.modules(), model.config, model.config.get_text_config()]
    before = [
        (owner, name, length, most)
        for owner in owners
        for name, most in (dict.fromkeys(REACHES, WINDOW) | indexer.reaches(owner)).items()
        if isinstance(length := getattr(owner, name, None), int) and length > most
    ]
    for owner, name, _, most in before:
        setattr(owner, name, most)
    try:
        yield
    finally:
        for owner, name, length, _ in reversed(before):
            setattr(owner, name, length)
