"""The guesses of the target's own speculator, for sessions whose step has just ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import isfinite

from outrider.engine.engine import Engine
from outrider.engine.speculator import LEAST_SURVIVAL
from outrider.sampling.ranked import Ranked
from outrider.sampling.sampler import Row
from verifier.meter import Meter
from verifier.own_guesses import Own, add_guesses
from verifier.part import Part
from verifier.running import Running
from verifier.session import Outcome, SessionSpec
from verifier.survival_calibration import SurvivalCalibration

log = logging.getLogger(__name__)

SMOOTHING = 0.1
LEAST_BESIDE = 0.02  # survival of a token beside a guess
USUAL = (
    0.5  # of guesses are right: what one more would bring, as a share of the survival of the one before it
)


class SpeculatorGuesses:
    """Adds them to the sessions' trees, between two steps. An engine without a speculator has none."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._engine, self._clock = engine, clock
        self.most = 0 if engine.speculating is None else engine.speculating.guesses
        self._seconds = 0.0  # that a guess takes, for all sessions together
        # Greedy text is guessed much better, and a draw's noise makes it look surer than it is.
        self._believed = {greedy: SurvivalCalibration() for greedy in (True, False)}

    def believed(self, spec: SessionSpec) -> SurvivalCalibration:
        """Returns how far guesses for such a session are believed, which all that are like it have shown."""
        return self._believed[spec.params.sampling.greedy]

    async def add(
        self,
        parts: Sequence[Part],
        outcomes: Sequence[tuple[Running, Outcome]],
        meter: Meter,
    ) -> None:
        """Guesses behind what the step of these parts has drawn, as far as it is worth the time of the guess
        and its place in a step. Whose drafts rest is left out.

        A guess is many short calls: what else runs in this process meanwhile holds them up."""
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
        price, began = meter.price, self._clock()
        cost = price and price + meter.goodput * self._seconds / len(wanting)
        least = max(LEAST_SURVIVAL, cost / (USUAL * self._truth([each.spec for each in sessions])))
        try:
            found = await self._engine.run(self._engine.guess, places, tokens, rows, least)
        except Exception:
            log.exception("the speculator failed: it guesses no more")
            self.most = 0
            return
        seconds = (self._clock() - began) / len(found[0])
        self._seconds += (SMOOTHING if self._seconds else 1.0) * (seconds - self._seconds)
        for (running, _), ranked in zip(wanting, found, strict=True):
            if not running.session.resting:
                add_guesses(running.session.tree, *_tree(ranked, max(LEAST_BESIDE, price)))

    def _truth(self, specs: Sequence[SessionSpec]) -> float:
        """Returns for how much counts what two guesses say, one behind the other, in the mean."""
        return sum(self.believed(spec).at(0) * self.believed(spec).at(1) for spec in specs) / len(specs)

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


def _tree(ranked: Sequence[Ranked], least: float) -> tuple[list[int], list[float], Own, list[int]]:
    """Returns guesses as `add_guesses` takes them, one behind the other, and beside each what came next in
    its draw, as far as it survives with `least`; none from one that is no number on, as a state may be."""
    tokens, survival, parents = list[int](), list[float](), list[int]()
    reach, last = 1.0, -1  # of the guess before
    for one in ranked:
        if not all(map(isfinite, one.shares)):
            break
        chances = [reach * share for share in one.shares]
        kept = 1 + sum(chance >= least for chance in chances[1:])
        tokens += one.ids[:kept]
        survival += chances[:kept]
        parents += [last] * kept
        reach, last = chances[0], len(tokens) - kept
    return tokens, survival, Own.SPECULATOR, [] if parents == list(range(-1, len(tokens) - 1)) else parents
