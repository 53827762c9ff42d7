"""How far a text has come in its grammar, as llguidance knows it, of tokens that tokenizer and model have."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# What a token may cost: some 30 ms at most. Ordinary schemas take 0.05 ms.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_lexer_states=16_384,  # of 2 KiB
    max_grammar_size=100_000,
    verbose_errors=False,
)
BY_ID = re.compile(r"<\[([^\]<]*)\]>")  # tokens that a grammar names by their ids; found in one pass
ONE_ID = re.compile(r"\s*\d{1,9}\s*")

Mask = npt.NDArray[np.uint8]
"""Whether each token id may come: a bit each, the lowest id in the lowest bit."""


class Matcher:
    """Shares nothing with others. Copies of one would share its lexer: where one text takes that beyond its
    limits all would end, and a thread would wait for another's mask."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, vocab_size: int | None) -> None:
        """`vocab_size`: of the model, which may have fewer tokens, or more; None = as many."""
        self._library = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        self._size = tokenizer.vocab_size if vocab_size is None else min(vocab_size, tokenizer.vocab_size)
        self._lacking = self._size < tokenizer.vocab_size
        # llguidance 1.9.1 goes back to a wrong place if an ordinary token was taken by its id.
        self.goes_back = all(_special(tokenizer, named) for named in _named_by_id(grammar))
        """Whether it may be told of tokens that the text does not have yet."""

    def mask(self) -> Mask | None:
        """Returns what may come; None if nothing can, or that is not known."""
        found = np.frombuffer(self._library.compute_bitmask(), np.uint8)
        if self._lacking:
            whole, rest = divmod(self._size, 8)
            found = found.copy()
            found[whole] &= (1 << rest) - 1
            found[whole + 1 :] = 0
        return None if self._library.is_error() or not found.any() else found

    def forced(self) -> list[int]:
        """Returns the next tokens of which there is no choice."""
        return self._known(self._library.compute_ff_tokens())

    def fitting(self, tokens: Sequence[int]) -> int:
        """Returns how many of the tokens may follow, one after the other."""
        return int(self._library.validate_tokens(self._known(tokens))) if self.goes_back else 0

    def take(self, tokens: Sequence[int]) -> int:
        """Goes on by as many of the tokens as may follow, and returns how many. `back` takes them back."""
        return int(self._library.try_consume_tokens(self._known(tokens))) if self.goes_back else 0

    def back(self, count: int) -> None:
        """Takes back the last tokens that were taken."""
        self._library.rollback(count)

    def follow(self, tokens: Sequence[int]) -> str | None:
        """Goes on by tokens that the text has got. Returns why that cannot be."""
        known = self._known(tokens)
        went = self._library.consume_tokens(known) and len(known) == len(tokens)
        return None if went else self.fault()

    def is_error(self) -> bool:
        """Returns whether it is of no use any more."""
        return bool(self._library.is_error())

    def fault(self) -> str:
        """Returns why a text cannot go on, in one line."""
        lines = [line.strip() for line in self._library.get_error().splitlines()]
        return " ".join(line for line in lines if line and line != "<non-verbose/>") or "no text can obey it"

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens before the first that tokenizer or model lack. The former would be an error for
        good; the latter a grammar can force, but no model can draw it."""
        for place, token in enumerate(tokens):
            if token >= self._size:
                return list(tokens[:place])
        return list(tokens)


def _named_by_id(grammar: str) -> list[str]:
    """Returns what stands between each <[ and ]>, in JSON also where its characters are escaped."""
    with suppress(ValueError, RecursionError):  # it is not in JSON, or such as the library refuses
        grammar = json.dumps(json.loads(grammar), ensure_ascii=False)
    return BY_ID.findall(grammar)


def _special(tokenizer: LLTokenizer, named: str) -> bool:
    """Returns whether that is one token, and one that only an id names."""
    if not ONE_ID.fullmatch(named):
        return False
    return int(named) >= tokenizer.vocab_size or bool(tokenizer.is_special_token(int(named)))
