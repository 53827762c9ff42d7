"""Log-probabilities of a prompt as the API tells them. Made only when they are written: they may be many."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap

from outrider.wire.logprobs import PromptLogprobs
from router.api.json_text import Made, after
from router.api.logprobs import Scored, Told, bounded, of_completion, piece_text


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The tokens of one prompt, and how likely the model found each but the first."""

    ids: Sequence[int]
    logprobs: PromptLogprobs
    token_bytes: Callable[[int], bytes]
    hidden: frozenset[int]  # ids that give no text
    asked: bool = True  # by vLLM's `prompt_logprobs`
    repeated: bool = False  # by OpenAI's `logprobs` of a text that repeats its prompt

    @property
    def numbers(self) -> int:
        """How many log-probabilities these are."""
        return len(self.logprobs) + len(self.logprobs.top)

    def at(self, index: int) -> tuple[Told, tuple[Told, ...], int]:
        """Returns a token but the first, the likeliest in its place, and its rank."""
        logprob, rank, top = self.logprobs.at(index - 1)
        return self._told(self.ids[index], logprob), tuple(starmap(self._told, top)), rank

    def entries(self) -> Sequence[object]:
        """Returns vLLM's list: nothing for the first token, then for each an object by token id."""

        def entry(index: int) -> object:
            if not index:
                return None
            own, top, own_rank = self.at(index)
            told = {str(own.token_id): _entry(own, own_rank)}
            for rank, one in enumerate(top, start=1):
                told.setdefault(str(one.token_id), _entry(one, rank))
            return told

        return Made(range(len(self.ids)), entry)

    def before(self, scored: Sequence[Scored]) -> dict[str, object]:
        """Returns OpenAI's object of a completion that repeats its prompt, with the tokens that follow it."""
        count, offsets = len(self.ids), self._offsets()

        def at(index: int) -> Scored:
            return Scored(*self.at(index)[:2], offsets[index]) if index < count else scored[index - count]

        told = of_completion(Made(range(1, count + len(scored)), at))
        first = piece_text(self.token_bytes(self.ids[0]))
        heads = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: after(heads[name], values) for name, values in told.items()}

    def _told(self, token: int, logprob: float) -> Told:
        return Told(token, self.token_bytes(token), bounded(logprob))

    def _offsets(self) -> array[int]:
        """Returns how many characters of the text are before each token."""
        utf8, offsets, offset = codecs.getincrementaldecoder("utf-8")("replace"), array("I"), 0
        for token in self.ids:
            offsets.append(offset)
            if token not in self.hidden:
                offset += len(utf8.decode(self.token_bytes(token)))
        return offsets


def _entry(told: Told, rank: int) -> dict[str, object]:
    return {"logprob": told.logprob, "rank": rank, "decoded_token": told.text}
