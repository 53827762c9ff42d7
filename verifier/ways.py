"""The ways in which a verifier can run: with drafts, or without them and with the cores that they leave.

The governor says which. Here is what follows from that: each way has a meter of its own, because what a step
takes in one says little about another, and the engine its number of threads. A step that reads much of
prompts has all of them in any way: few drafts are lost in its time.

Greedy text is guessed much better than drawn text. So there is a governor for the time when most sessions are
greedy, and one for the time when most are not: what one has found is no answer for the other. And there is
one for the time when no session wants drafts: its steps would tell the others that drafts bring nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from verifier.governor import Governor, StepSeen
from verifier.meter import Meter
from verifier.price import StepTime

log = logging.getLogger(__name__)


class Way(NamedTuple):
    drafts: bool  # whether any are taken; if not, drafters rest
    threads: int  # of the engine


class Threads(Protocol):
    """What of an engine differs between ways."""

    threads: int
    resting_threads: int

    def use_threads(self, count: int) -> None: ...


def ways(threads: int, resting_threads: int) -> list[Way]:
    """Returns them as they are tried: the first with drafts and `threads`, which are the most with drafts,
    the second without any. Where other programs take cores, or a step is small, fewer may be faster."""
    most, fewest = max(threads, resting_threads), min(threads, resting_threads)
    found = [Way(True, threads), Way(False, most), Way(True, fewest), Way(False, fewest)]
    return list(dict.fromkeys(found))


DRAFTED = 0  # the way that a verifier begins with
UNWANTED = 2  # the governor for sessions that want no drafts
WORTH_ALL = 32  # tokens of prompts in a step, from which on it gets the cores of drafters, too
MOST = 2 / 3  # share of the sessions
MOST_KNOWN = 1024  # drafters that are remembered to have drafted here


class Ways:
    """Runs one at a time. Without `draw`, a source of random numbers, it is always that with drafts."""

    def __init__(
        self, engine: Threads, step_time: StepTime | None, draw: Callable[[], float] | None = None
    ) -> None:
        self._engine = engine
        self._ways = [Way(True, 0)] if draw is None else ways(engine.threads, engine.resting_threads)
        self._meters = [_meter(step_time) for _ in self._ways]
        self._governors = () if draw is None else tuple(Governor(len(self._ways), draw) for _ in range(3))
        self._governor = self._of_text = self._governors[0] if self._governors else None
        self._drafted = False  # whether anybody drafted in the last step
        self._known: OrderedDict[str, None] = OrderedDict()  # drafters of which something was found

    @property
    def _now(self) -> int:
        return DRAFTED if self._governor is None else self._governor.way

    @property
    def meter(self) -> Meter:
        return self._meters[self._now]

    def longest_step(self, tokens: int) -> float:
        """Returns the seconds that a step of so many tokens takes in the slowest way: one that has not run
        for a while is not known to be faster now."""
        return max(meter.step_time.at(tokens) for meter in self._meters)

    @property
    def resting(self) -> bool:
        """Returns whether no drafts are taken."""
        return not self._ways[self._now].drafts

    @property
    def gain(self) -> float:
        """Returns the goodput with drafts over the best without, as last compared; 0 = not compared yet."""
        if self._of_text is None:
            return 0.0
        found = self._of_text.gain
        numbers = range(len(self._ways))
        gains = [
            min(
                (gain for way in numbers if not self._ways[way].drafts if (gain := found(drafted, way))),
                default=0.0,
            )
            for drafted in numbers
            if self._ways[drafted].drafts
        ]
        return max(gains)

    @property
    def trials(self) -> int:
        return sum(governor.trials for governor in self._governors)

    def turn_to(self, greedy: int, sessions: int, wanted: bool = True) -> bool:
        """Says of the next step how many of its sessions are greedy, and whether any wants drafts. Returns
        whether drafts rest from now on, or are taken again."""
        if self._governor is None or not sessions:
            return False
        rested = self.resting
        before, share = self._governor, greedy / sessions
        if share >= MOST or share <= 1 - MOST:
            self._of_text = self._governors[share <= 1 - MOST]
        now = self._of_text if wanted else self._governors[UNWANTED]
        if now is not None and now is not before:
            now.resume()
        self._governor = now
        return self.resting is not rested

    def observe(self, step: StepSeen, drafted: bool, drafters: Callable[[], Iterable[str]] = tuple) -> bool:
        """Takes in a step in which nobody's prompt was read; `drafted`: whether anybody drafts for any of its
        sessions, and `drafters` returns who. Returns whether drafts rest from now on, or are taken again."""
        governor, came = self._governor, drafted and not self._drafted
        self._drafted = drafted
        if governor is None or not (drafted or len(self._ways) > 2):
            return False
        # Sessions begin without drafts, and may want none: that one is back who was here is no news.
        if came and self._of_text is not None and self._anybody_new(drafters()) and self.resting:
            self._of_text.alarm()
        rested, usual = self.resting, governor.usual
        governor.observe(step)
        if governor.usual != usual and governor is self._of_text:
            way = self._ways[governor.usual]
            how = "drafts are taken" if way.drafts else "drafts rest"
            log.info(
                "%s, with %d threads: with them %.2f of the tokens without are committed",
                how,
                way.threads,
                self.gain,
            )
        return self.resting is not rested

    def _anybody_new(self, drafters: Iterable[str]) -> bool:
        new = [each for each in drafters if each not in self._known]
        self._known.update(dict.fromkeys(new))
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return bool(new)

    def use_threads(self, reading: int) -> None:
        """Gives the engine its threads for a step that reads so many tokens of prompts."""
        if self._governor is None:
            return
        all_threads = max(way.threads for way in self._ways)
        self._engine.use_threads(all_threads if reading >= WORTH_ALL else self._ways[self._now].threads)


def _meter(step_time: StepTime | None) -> Meter:
    return Meter() if step_time is None else Meter(StepTime(step_time.tokens, step_time.profile))
