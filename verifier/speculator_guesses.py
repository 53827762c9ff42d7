"""The guesses of the target's own speculator, for sessions whose step has just ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isfinite
from operator import mul

from outrider.engine.engine import Engine
from outrider.sampling.sampler import Row
from verifier.own_guesses import Own, add_guesses
from verifier.part import Part
from verifier.running import Running
from verifier.session import Outcome

log = logging.getLogger(__name__)


class SpeculatorGuesses:
    """Adds them to the sessions' trees, between two steps. An engine without a speculator has none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.most = 0 if engine.speculating is None else engine.speculating.guesses

    async def add(
        self,
        parts: Sequence[Part],
        outcomes: Sequence[tuple[Running, Outcome]],
        meanwhile: Callable[[], None],
    ) -> None:
        """Guesses behind what the step of these parts has drawn; `meanwhile` is called while the engine is at
        it. Whose drafts rest is left out."""
        wanting = self._wanting(parts, outcomes)
        if not wanting:
            return
        most = min(self.most, max(running.session.wanted for running, _ in wanting))
        sessions = [running.session for running, _ in wanting]
        rows = [
            [Row(each.spec.params.sampling, len(each.log) + ahead, None, ()) for each in sessions]
            for ahead in range(most)
        ]
        places, tokens = [place for _, place in wanting], [each.log[-1] for each in sessions]
        guessing = self._engine.run(self._engine.guess, places, tokens, rows)
        meanwhile()
        try:
            found = await guessing
        except Exception:
            log.exception("the speculator failed: it guesses no more")
            self.most = 0
            return
        for (running, _), ranked in zip(wanting, found, strict=True):
            chances = list(accumulate((one.shares[0] for one in ranked), mul))
            if running.session.resting or not all(map(isfinite, chances)):  # a state may be no number
                continue
            add_guesses(running.session.tree, [one.ids[0] for one in ranked], chances, Own.SPECULATOR)

    def guesses_for(self, running: Running) -> bool:
        """Returns whether the session may have guesses."""
        return self.most > 0 and running.speculated is not None and running.session.wanted > 0

    def _wanting(
        self, parts: Sequence[Part], outcomes: Sequence[tuple[Running, Outcome]]
    ) -> list[tuple[Running, int]]:
        """Returns the sessions that may have guesses, with the row of each from which its last token came."""
        settled = {running.id: outcome for running, outcome in outcomes}
        found, first = list[tuple[Running, int]](), 0
        for part in parts:
            begin, first = first + part.scored, first + part.scored + part.drawn
            running = part.running
            outcome = settled.get(running.id)
            if outcome is None or outcome.finish is not None:
                continue
            if self.guesses_for(running) and not running.session.resting:
                found.append((running, begin + (1 + outcome.followed[-1] if outcome.followed else 0)))
        return found
