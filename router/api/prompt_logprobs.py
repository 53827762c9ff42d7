"""Log-probabilities of a prompt as the API tells them. Made only when they are written: they may be many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.wire.logprobs import Logprob, PromptLogprobs
from router.api.logprobs import Scored, Scoring, Told, of_completion


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The tokens of one prompt, and how likely the model found each but the first."""

    ids: Sequence[int]
    logprobs: PromptLogprobs
    token_bytes: Callable[[int], bytes]
    hidden: frozenset[int]  # ids that give no text
    asked: bool = True  # by vLLM's `prompt_logprobs`
    repeated: bool = False  # by OpenAI's `logprobs` of a text that repeats its prompt

    def scored(self) -> tuple[Told, list[tuple[Scored, int]]]:
        """Returns the first token, and every other with its rank."""
        scoring = Scoring(self.token_bytes, self.hidden)
        first = scoring.push(self.ids[0], Logprob(0.0)).own
        others = zip(self.ids[1:], self.logprobs.each(), strict=True)
        return first, [
            (scoring.push(token, Logprob(own, tuple(top))), rank) for token, (own, rank, top) in others
        ]

    def entries(self) -> list[dict[str, object] | None]:
        """Returns vLLM's list: nothing for the first token, then for each an object by token id."""
        entries: list[dict[str, object] | None] = [None]
        for scored, own_rank in self.scored()[1]:
            entry: dict[str, object] = {str(scored.own.token_id): _entry(scored.own, own_rank)}
            for rank, one in enumerate(scored.top, start=1):
                entry.setdefault(str(one.token_id), _entry(one, rank))
            entries.append(entry)
        return entries

    def before(self, scored: Sequence[Scored]) -> dict[str, object]:
        """Returns OpenAI's object of a completion that repeats its prompt, with the tokens that follow it."""
        first, others = self.scored()
        told = of_completion([*(one for one, _ in others), *scored])
        heads = {"tokens": first.text, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: [heads[name], *values] for name, values in told.items()}


def _entry(told: Told, rank: int) -> dict[str, object]:
    return {"logprob": told.logprob, "rank": rank, "decoded_token": told.text}
