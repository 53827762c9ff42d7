"""Guesses of a cheaper source that the draft model checks in one step of its own, before they travel.

Behind the text that runs stand the tokens that a look-up expects next. Each row says what the model itself
guesses there: so as far as it agrees it has the guesses that it would have made one by one, and where it does
not, its own stands and the rest is dropped. What is sent is the same, after fewer steps. Source: Chen et al.,
"Cascade Speculative Drafting", arXiv 2312.11462, the vertical cascade. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from drafter.drafting import Part
from drafter.masks import free_slots
from drafter.session import DraftSession
from drafter.text_index import LONGEST, TextIndex
from outrider.engine.kv_blocks import BlockPool

SHORTEST = 3  # tokens that must be the same
MOST_CHECKED = 8  # tokens in a step
LEAST_CHANCE = 0.3  # that the model agrees with a token and all before it: below, it is not worth its row
FIRST_RATE = 0.6  # how often it agrees, before any was seen
RATE = 0.1  # weight of one more


class LookUp:
    """What a session's own text says may come next, and how often its draft model has agreed."""

    def __init__(self, session: DraftSession) -> None:
        self._session = session
        self._index = TextIndex(session.log, session.spec.params.most_tokens, SHORTEST)
        self._rate = FIRST_RATE
        self._first: int | None = None  # token that was expected last; None = none was

    def expects(self, most: int) -> list[int]:
        """Returns the tokens that are worth to be checked behind all that is drafted, at most so many."""
        log = self._session.log
        drafted = [guess.token for guess in self._session.drafted]
        self._index.extended()
        places = self._index.matches([*log[-LONGEST:], *drafted][-LONGEST:])
        self._first = None
        if not places:
            return []
        position, _ = max(places, key=lambda place: place[1])  # of equals the latest
        ahead = list[int]()
        chance = 1.0
        for at in range(position, position + max(most, 1)):
            token = log[at] if at < len(log) else [*drafted, *ahead][at - len(log)]
            self._first = token if self._first is None else self._first
            chance *= self._rate
            if chance < LEAST_CHANCE or len(ahead) == most:
                break
            ahead.append(token)
        return ahead

    def judge(self, guesses: list[int], checked: int) -> None:
        """Takes in what the model guessed where so many tokens were checked: it went on as far as it agreed.
        If none was, what was expected first is a trial, too."""
        if self._first is None or not guesses:
            return
        agreed = len(guesses) - 1 if checked else int(guesses[0] == self._first)
        for _ in range(agreed):
            self._rate += RATE * (1 - self._rate)
        if agreed < max(checked, 1):
            self._rate -= RATE * self._rate


def with_lookups(parts: list[Part], pool: BlockPool, most_tokens: int) -> list[Part]:
    """Returns parts of trunks with what look-ups expect behind each, where there is room in the pool and in a
    step of so many tokens."""
    room, checking = most_tokens - sum(len(part.tokens) for part in parts), list[Part]()
    for part in parts:
        drafting, session = part.drafting, part.drafting.session
        if drafting.one_row or part.start + len(part.tokens) < session.length:
            checking.append(part)  # its draw depends on those before it, or there is text to read yet
            continue
        if drafting.look_up is None:
            drafting.look_up = LookUp(session)
        most = min(session.window - len(session.drafted), session.last - session.length) - 1
        most = min(most, MOST_CHECKED, room, free_slots(part, pool))
        checked = tuple(drafting.look_up.expects(max(most, 0)))
        pool.extend(drafting.table, len(checked))
        room -= len(checked)
        tokens, rows = part.tokens + checked, part.rows + len(checked)
        checking.append(replace(part, tokens=tokens, rows=rows, checked=len(checked)))
    return checking
