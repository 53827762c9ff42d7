"""Holds what a drafter has learned about its targets, and turns draws into guesses with their chances. No
torch."""

from __future__ import annotations

from collections.abc import Sequence

from drafter.session import Alternative, Guess, Verdict
from drafter.survival import Calibration, recent_after
from outrider.sampling.ranked import Ranked

ALTERNATIVES = 3  # of each guess: what the target takes instead is one of them in four of five cases
FIRST_RATES = (0.6, 0.2, 0.1)  # how often the target takes each, if it does not take the guess


class AcceptanceModel:
    """Learns from every position that is committed, of all sessions of one kind together.

    No request is left out: penalties, biases and all else that the target's draw goes through, the drafter's
    goes through too."""

    def __init__(self) -> None:
        self.taken = Calibration()  # of guesses
        self.instead = Calibration()  # of alternatives, if the guess was wrong
        self.rates = list(FIRST_RATES)
        self.rejections = 0  # guesses on a trunk that the target did not take
        self.covered = 0  # of them, those where a branch had the target's token

    def guesses(self, draws: Sequence[Ranked], recent: Sequence[float], depth: Sequence[int]) -> list[Guess]:
        """Returns the draws as guesses; `recent` and `depth` as in Guess."""
        return [self._guess(*each) for each in zip(draws, recent, depth, strict=True)]

    def _guess(self, draw: Ranked, recent: float, depth: int) -> Guess:
        token, confidence = draw.ids[0], draw.shares[0]
        rest = max(1 - confidence, 1e-9)
        others = zip(draw.ids[1:], draw.shares[1:], self.rates, strict=False)
        alternatives = tuple(
            Alternative(other, part := share / rest, self.instead.probability(part, rate, depth))
            for other, share, rate in others
        )
        acceptance = self.taken.probability(confidence, recent, depth)
        return Guess(token, confidence, recent, depth, acceptance, alternatives)

    def judged(self, guess: Guess, token: int) -> None:
        """Learns from what the target chose in the place of a guess, all before which was right."""
        accepted = token == guess.token
        self.taken.observe(guess.confidence, guess.recent, guess.depth, accepted)
        if accepted:
            return
        for rank, other in enumerate(guess.alternatives):
            right = token == other.token
            self.instead.observe(other.share, self.rates[rank], guess.depth, right)
            self.rates[rank] = recent_after(self.rates[rank], right)

    def learn(self, verdict: Verdict) -> None:
        """Learns from a commit."""
        for guess, token in verdict.judged:
            self.judged(guess, token)
        if verdict.rejected:
            self.rejections += 1
            self.covered += verdict.adopted is not None
