"""The guesses of the target's own speculator, for sessions whose step has just ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from outrider.engine.engine import Engine
from outrider.sampling.sampler import Row
from verifier.own_guesses import Own, add_guesses
from verifier.part import Part
from verifier.running import Running
from verifier.session import Outcome


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
        found = await guessing
        for (running, _), ranked in zip(wanting, found, strict=True):
            if running.session.resting:  # its router may have had it end meanwhile, too: then nobody looks
                continue
            chances = list(accumulate((one.shares[0] for one in ranked), mul))
            add_guesses(running.session.tree, [one.ids[0] for one in ranked], chances, Own.SPECULATOR)

    def _wanting(
        self, parts: Sequence[Part], outcomes: Sequence[tuple[Running, Outcome]]
    ) -> list[tuple[Running, int]]:
        """Returns the sessions that may have guesses, with the row of each from which its last token came."""
        if not self.most or any(part.scored for part in parts):  # whose rows stand between the others
            return []
        settled = {running.id: outcome for running, outcome in outcomes}
        found, first = list[tuple[Running, int]](), 0
        for part in parts:
            begin, first = first, first + part.drawn
            running, session = part.running, part.running.session
            outcome = settled.get(running.id)
            if outcome is None or outcome.finish is not None or not part.final or not running.speculated:
                continue
            if session.wanted > 0 and not session.resting:
                found.append((running, begin + (1 + outcome.followed[-1] if outcome.followed else 0)))
        return found
