"""Texts of the target, in a file that grows: a text that was written is there after a kill.

Beside it is what the target held likely at each place that it wrote: a draft learns from that. A speculator
learns from the states of these places, too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import StartupError

KEPT = 64  # tokens of each place
STATE = np.dtype(np.float16)
NO_STATES = np.zeros((0, 0), STATE)
PLACE = np.dtype([("ids", "<i4", (KEPT,)), ("probabilities", "<f2", (KEPT,))])
Likely = NDArray[np.void]  # of PLACE, one for each token that the target wrote
States = NDArray[np.float16]  # [tokens that the target wrote, H]: of which it drew each; H = 0: none are kept


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


class Lesson(NamedTuple):
    """A text, and what its target knew at each place that it wrote."""

    text: Text
    likely: Likely
    states: States


def load(file: Path, width: int = 0) -> list[Text]:
    """Returns the texts of a file, and cuts off what a kill left unfinished, here and beside. `width`: the
    numbers of a state, if states are kept. Raises StartupError if it holds something else."""
    content = file.read_bytes() if file.is_file() else b""
    whole = content.rfind(b"\n") + 1
    try:
        texts = [Text(**json.loads(line)) for line in content[:whole].splitlines()]
    except (ValueError, TypeError, RecursionError):
        raise StartupError(f"{file} is damaged: remove it, and the text is written anew") from None
    _cut(file, whole)
    written = sum(text.written for text in texts)
    _cut(_likely(file), written * PLACE.itemsize)
    if width:
        _cut(_states(file), written * width * STATE.itemsize)
    return texts


def load_lessons(file: Path, texts: Sequence[Text], width: int = 0) -> list[Lesson]:
    """Returns the texts of a file with what is beside. Raises StartupError if that is not there."""
    states = load_states(file, texts, width) if width else [NO_STATES] * len(texts)
    return list(map(Lesson, texts, load_likely(file, texts), states))


def load_likely(file: Path, texts: Sequence[Text]) -> list[Likely]:
    """Returns what was likely in each text of a file, read from the disk as it is used.

    Raises StartupError if that is not there."""
    return _load(_likely(file), file, texts, PLACE, ())


def load_states(file: Path, texts: Sequence[Text], width: int) -> list[States]:
    """Returns the states of each text of a file, as `load_likely` returns what was likely."""
    return _load(_states(file), file, texts, STATE, (width,))


def add(file: Path, lessons: Iterable[Lesson]) -> None:
    """Appends texts; they are on the disk when this returns, and what is beside before they are."""
    some = list(lessons)
    _append(_states(file), b"".join(each.states.tobytes() for each in some))
    _append(_likely(file), b"".join(each.likely.tobytes() for each in some))
    _append(file, b"".join(f"{json.dumps(asdict(each.text))}\n".encode() for each in some))


def remove(file: Path) -> None:
    for each in (file, _likely(file), _states(file)):
        each.unlink(missing_ok=True)


def _load(
    beside: Path, file: Path, texts: Sequence[Text], kind: np.dtype[Any], shape: tuple[int, ...]
) -> list[NDArray[Any]]:
    ends = list(accumulate(text.written for text in texts))
    whole = (ends[-1], *shape)
    if not beside.is_file() or beside.stat().st_size < math.prod(whole) * kind.itemsize:
        raise StartupError(f"{beside} is damaged: remove {file}, and the text is written anew")
    places = np.memmap(beside, kind, "r", shape=whole)
    return [places[end - text.written : end] for end, text in zip(ends, texts, strict=True)]


def _append(file: Path, content: bytes) -> None:
    if not content:
        return
    with file.open("ab") as end:
        end.write(content)
        end.flush()
        os.fsync(end.fileno())


def _cut(file: Path, size: int) -> None:
    if file.is_file() and file.stat().st_size > size:
        os.truncate(file, size)


def _likely(file: Path) -> Path:
    return file.with_suffix(".likely")


def _states(file: Path) -> Path:
    return file.with_suffix(".states")
