"""What a session's own text says may come next, for its draft model to check. No torch."""

from __future__ import annotations

from drafter.session import DraftSession
from drafter.text_index import LONGEST, TextIndex

SHORTEST = 3  # tokens that must be the same
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
