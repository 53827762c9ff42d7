"""Texts of the target, in a file that grows: what a batch wrote is there once it is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and what the target wrote after it."""

    ids: list[int]
    prompt: int  # tokens of it that were the prompt
    temperature: float
    seed: int  # of the noise with which it was drawn
    category: str = ""

    @property
    def written(self) -> int:
        """Returns how many tokens the target wrote."""
        return len(self.ids) - self.prompt


def load(file: Path) -> list[Text]:
    """Returns the texts of a file, and cuts off a line that a kill left unfinished."""
    if not file.is_file():
        return []
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(file, whole)
    return [Text(**json.loads(line)) for line in content[:whole].splitlines()]


def add(file: Path, texts: Iterable[Text]) -> None:
    """Appends texts; they are on the disk when this returns."""
    with file.open("a") as lines:
        lines.write("".join(json.dumps(asdict(text)) + "\n" for text in texts))
        lines.flush()
        os.fsync(lines.fileno())
