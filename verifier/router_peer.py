"""Holds what waits to be sent to one router, merged until its stream is ready to take it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace

from outrider.errors import OutriderError
from outrider.net.heartbeat import IDLE_HEARTBEATS
from outrider.wire.load import VerifierLoad
from outrider.wire.logprobs import PromptLogprobs
from outrider.wire.session import FinishReason
from outrider.wire.verifier_sessions import Committed, DrafterCutOff, Failed, Finished, VerifierEvents
from verifier.session import Outcome
from verifier.stepper import Running

STEP_TOKENS = 4096  # that a router hears at once of what it has missed of a session
MESSAGE_NUMBERS = 2**17  # of a message, at most 5 bytes each; routers refuse what is far more: MOST_ENTRIES
STEP_NUMBERS = 16  # that the rest of a step is as large as
GUESS_NUMBERS = 64  # that a guess is as large as, with its drafter's name


class RouterPeer:
    """The events for one router."""

    def __init__(self, load: VerifierLoad) -> None:
        """`load` is that of now."""
        self._load = load
        self._beats = 0  # since it was told something
        self._events = VerifierEvents()
        self._ready = asyncio.Event()
        self._over = False
        self._parting = False
        self._dropped: dict[str, int] = {}  # as it was told last, or is about to be
        self._untold_dropped: dict[str, int] = {}
        self._why: OutriderError | None = None  # it is over, if the router is to be told

    def committed(self, running: Running, opening: int, outcome: Outcome) -> None:
        session = running.session
        first = outcome.base == len(session.spec.params.prompt) + len(session.spec.output)
        cached = (running.cached_prompt_tokens or 0) if first else 0
        prompt = running.prompt if first and not session.spec.output else None
        self._events.committed.append(_committed(running, opening, outcome, cached, prompt))
        if outcome.finish is not None:
            self._events.finished.append(Finished(running.id, opening, outcome.finish))

    def adopted(self, running: Running, opening: int, finish: FinishReason | None) -> None:
        """Tells a router that has a session again what the session has beyond what the router knows, and its
        end if it has come."""
        spec, log = running.session.spec, running.session.log
        known = len(spec.params.prompt) + len(spec.output)
        if known < len(log):
            cached = (running.cached_prompt_tokens or 0) if not spec.output else 0
            if spec.params.guesses:
                missed = [one for one in running.told if one.base + len(one.tokens) > known]
            else:
                told = len(running.logprobs)
                scored = running.logprobs.part(max(told + known - len(log), 0), told)
                missed = [
                    Outcome(
                        known + start,
                        tuple(log[known + start :][:STEP_TOKENS]),
                        *(0, 0, None),
                        scored[start : start + STEP_TOKENS],
                    )
                    for start in range(0, len(log) - known, STEP_TOKENS)
                ]
            first = (cached, running.prompt if not spec.output else None)
            self._events.committed.extend(
                _committed(running, opening, one, *((0, None) if index else first))
                for index, one in enumerate(missed)
            )
        if finish is not None:
            self._events.finished.append(Finished(running.id, opening, finish))
        self._ready.set()

    def failed(self, session_id: bytes, opening: int, error: OutriderError) -> None:
        self._events.failed.append(Failed(session_id, opening, error))
        self._ready.set()

    def cut_off(self, session_id: bytes, opening: int, turn: int, reason: str) -> None:
        """Tells that the session's drafter of that turn misbehaves, and may not draft here any more."""
        self._events.cut_off.append(DrafterCutOff(session_id, opening, turn, reason))
        self._ready.set()

    def dropped(self, counts: Mapping[str, int]) -> None:
        """Tells what was dropped of what drafters sent, since the start, by reason."""
        if counts != self._dropped:
            self._dropped = self._untold_dropped = dict(counts)

    def report(self, load: VerifierLoad) -> None:
        """Sends what has gathered, with the load."""
        self._load = load
        self._beats = 0
        self._ready.set()

    def beat(self, load: VerifierLoad, concerned: bool) -> None:
        """Gives a sign of life if nothing else is on its way. A router that is not `concerned`, as it has no
        session here, gets it now and then, or with what is news to it."""
        self._beats += 1
        due = concerned or self._beats >= IDLE_HEARTBEATS or bool(self._untold_dropped)
        if not self._ready.is_set() and (due or load.is_news(self._load)):
            self.report(load)

    def close_gracefully(self) -> None:
        """Ends the stream once everything is said."""
        self._parting = True
        self._ready.set()

    def end(self, why: OutriderError | None = None) -> None:
        """Ends the stream at once; `why` is for the router, if it is still there."""
        self._over, self._why = True, why
        self._ready.set()

    async def events(self) -> AsyncIterator[VerifierEvents]:
        """Yields a message whenever there is something to tell, or several if it is much; a slow reader gets
        fewer, larger ones. Raises why the stream was ended."""
        parting = False
        while not parting:
            await self._ready.wait()
            if self._why is not None:
                raise self._why
            if self._over:
                return
            self._ready.clear()
            parting = self._parting
            events, self._events = self._events, VerifierEvents()
            dropped, self._untold_dropped = self._untold_dropped, {}
            *pages, last = _pages(events.committed)
            for page in pages:
                yield VerifierEvents(committed=page, load=self._load)
            yield replace(events, committed=last, load=self._load, dropped=dropped)


def _pages(steps: Sequence[Committed]) -> Iterator[list[Committed]]:
    """Returns the steps, in their order, in lists that each fit into a message; the last may be empty."""
    page: list[Committed] = []
    numbers = 0
    for step in steps:
        scored = len(step.logprobs) * (1 + 2 * len(step.logprobs[0].top)) if step.logprobs else 0
        if step.prompt is not None:
            scored += 2 * (len(step.prompt) + len(step.prompt.top))
        more = STEP_NUMBERS + len(step.tokens) + scored + GUESS_NUMBERS * len(step.guesses)
        if page and numbers + more > MESSAGE_NUMBERS:
            yield page
            page, numbers = [], 0
        page.append(step)
        numbers += more
    yield page


def _committed(
    running: Running,
    opening: int,
    outcome: Outcome,
    cached_prompt_tokens: int,
    prompt: PromptLogprobs | None,
) -> Committed:
    return Committed(
        running.id,
        opening,
        outcome.base,
        outcome.tokens,
        outcome.accepted,
        outcome.verified,
        cached_prompt_tokens,
        outcome.logprobs,
        outcome.guesses,
        prompt,
        outcome.beside,
        outcome.own,
        outcome.drafters,
    )
