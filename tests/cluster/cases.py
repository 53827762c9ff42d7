"""Requests whose answers the tests know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from demo.heldout import heldout_prompts
from outrider.sampling.params import SamplingParams
from tests.cluster.client import Answer, HostClient, Request
from tests.e2e.conftest import TARGET, Alone

SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=11))
PLAIN = {"num_speculative_tokens": 0}  # no drafts


@dataclass(frozen=True)
class Case:
    """A greedy or a seeded request, and how many tokens it asks for."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int

    @property
    def request(self) -> Request:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": self.sampling.seed,
        }

    def expected(self, alone: Alone) -> str:
        tokens = alone.tokens(self.prompt, self.sampling, self.max_tokens)
        return _tokenizer().decode(tokens, skip_special_tokens=True)


def cases(count: int, max_tokens: int = 48) -> list[Case]:
    """Greedy and seeded in turn, each with a prompt of its own."""
    prompts = [tuple(_tokenizer().encode(text).ids) for text in heldout_prompts(count)]
    return [Case(prompt, SAMPLINGS[i % len(SAMPLINGS)], max_tokens) for i, prompt in enumerate(prompts)]


def ask_and_check(client: HostClient, asked: Sequence[Case], alone: Alone) -> list[Answer]:
    """Asks all at once, with drafts and then without: both times every text is the target's own.

    Returns the answers that had drafts."""
    answers = client.ask_together([case.request for case in asked])
    plain = client.ask_together([{**case.request, **PLAIN} for case in asked])
    for case, drafted, undrafted in zip(asked, answers, plain, strict=True):
        assert drafted.text == case.expected(alone)
        assert undrafted.text == drafted.text
        assert undrafted.told.acceptance_rate is None, "a plain request had drafts"
    return answers


def accepted(answers: Sequence[Answer]) -> bool:
    """Returns True if drafts took part and were right at least once."""
    return any(answer.told.acceptance_rate for answer in answers)


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))
