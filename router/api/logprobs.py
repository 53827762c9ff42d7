"""Log-probabilities as the API tells them: each token with its text."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from outrider.wire.logprobs import Logprob
from router.api.json_text import Made

LEAST = -9999.0  # as OpenAI tells what is next to impossible: JSON has no infinity


def piece_text(piece: bytes) -> str:
    """Returns a token as text; part of a character is told as its bytes, so that no two look alike."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def bounded(logprob: float) -> float:
    return max(LEAST, min(0.0, logprob))


@dataclass(frozen=True, slots=True)
class Told:
    """A token, and how likely it was."""

    token_id: int
    piece: bytes  # of the text
    logprob: float

    @property
    def text(self) -> str:
        return piece_text(self.piece)


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the output."""

    own: Told
    top: tuple[Told, ...]
    offset: int  # characters of the text before it


class HeldScores(Sequence[Scored]):
    """The scored tokens of an answer until it is told. In arrays: objects would take twenty times as much
    memory, and an answer may be as long as a context."""

    def __init__(self) -> None:
        self._ids, self._logprobs = array("I"), array("f")  # of each token, then of the likeliest there
        self._ends, self._offsets = array("L"), array("I")  # of each token
        self._pieces: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        part = range(self._ends[index - 1] if index else 0, self._ends[index])
        own, *top = [Told(self._ids[at], self._pieces[self._ids[at]], self._logprobs[at]) for at in part]
        return Scored(own, tuple(top), self._offsets[index])

    def extend(self, more: Iterable[Scored]) -> None:
        for one in more:
            for told in (one.own, *one.top):
                self._ids.append(told.token_id)
                self._logprobs.append(told.logprob)  # which came in 32 bits
                self._pieces[told.token_id] = told.piece
            self._ends.append(len(self._ids))
            self._offsets.append(one.offset)


class Scoring:
    """The log-probabilities of one output, token by token."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], hidden: Set[int] = frozenset(), offset: int = 0
    ) -> None:
        """`hidden`: ids that give no text. `offset`: characters of text before the first token."""
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def push(self, token: int, logprob: Logprob) -> Scored:
        told = [self._told(*one) for one in ((token, logprob.logprob), *logprob.top)]
        scored = Scored(told[0], tuple(told[1:]), self._offset)
        if token not in self._hidden:
            self._offset += len(self._utf8.decode(told[0].piece))
        return scored

    def _told(self, token: int, logprob: float) -> Told:
        return Told(token, self._token_bytes(token), bounded(logprob))


def of_completion(scored: Sequence[Scored]) -> dict[str, Sequence[Any]]:
    """Returns OpenAI's object of a completion: the drawn token is always among the likeliest."""
    return {
        "tokens": _listed(scored, lambda one: one.own.text),
        "token_logprobs": _listed(scored, lambda one: one.own.logprob),
        "top_logprobs": _listed(
            scored, lambda one: {each.text: each.logprob for each in (*one.top, one.own)}
        ),
        "text_offset": _listed(scored, lambda one: one.offset),
    }


def of_chat(scored: Sequence[Scored]) -> dict[str, object]:
    """Returns OpenAI's object of a chat."""
    return {"content": entries(scored), "refusal": None}


def entries(scored: Sequence[Scored]) -> Sequence[object]:
    """Returns what OpenAI tells of each token."""
    return _listed(
        scored, lambda one: {**_entry(one.own), "top_logprobs": [_entry(each) for each in one.top]}
    )


def _listed(scored: Sequence[Scored], told: Callable[[Scored], object]) -> Sequence[object]:
    """Returns what is told of each; where they may be many, when it is written: all at once it would take
    sixty times as much memory."""
    return Made(scored, told) if isinstance(scored, HeldScores | Made) else [told(one) for one in scored]


def _entry(told: Told) -> dict[str, object]:
    return {"token": told.text, "logprob": told.logprob, "bytes": list(told.piece)}
