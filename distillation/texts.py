"""Texts of the target, in a file that grows: a text that was written is there after a kill.

Beside it is what the target held likely at each place that it wrote: a draft learns from that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import StartupError

KEPT = 64  # tokens of each place
PLACE = np.dtype([("ids", "<i4", (KEPT,)), ("probabilities", "<f2", (KEPT,))])
Likely = NDArray[np.void]  # of PLACE, one for each token that the target wrote


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
    """Returns the texts of a file, and cuts off what a kill left unfinished, here and beside."""
    content = file.read_bytes() if file.is_file() else b""
    whole = content.rfind(b"\n") + 1
    texts = [Text(**json.loads(line)) for line in content[:whole].splitlines()]
    _cut(file, whole)
    _cut(_beside(file), _bytes_of(texts))
    return texts


def load_likely(file: Path, texts: Sequence[Text]) -> list[Likely]:
    """Returns what was likely in each text of a file, read from the disk as it is used.

    Raises StartupError if that is not there."""
    beside = _beside(file)
    if not beside.is_file() or beside.stat().st_size < _bytes_of(texts):
        raise StartupError(f"{beside} is damaged: remove {file}, and the text is written anew")
    ends = list(accumulate(text.written for text in texts))
    places = np.memmap(beside, PLACE, "r", shape=(ends[-1],))
    return [places[end - text.written : end] for end, text in zip(ends, texts, strict=True)]


def add(file: Path, texts: Iterable[tuple[Text, Likely]]) -> None:
    """Appends texts; they are on the disk when this returns, and what was likely before they are."""
    some = list(texts)
    _append(_beside(file), b"".join(likely.tobytes() for _, likely in some))
    _append(file, b"".join(f"{json.dumps(asdict(text))}\n".encode() for text, _ in some))


def remove(file: Path) -> None:
    for each in (file, _beside(file)):
        each.unlink(missing_ok=True)


def _append(file: Path, content: bytes) -> None:
    with file.open("ab") as end:
        end.write(content)
        end.flush()
        os.fsync(end.fileno())


def _cut(file: Path, size: int) -> None:
    if file.is_file() and file.stat().st_size > size:
        os.truncate(file, size)


def _bytes_of(texts: Iterable[Text]) -> int:
    return sum(text.written for text in texts) * PLACE.itemsize


def _beside(file: Path) -> Path:
    return file.with_suffix(".likely")
