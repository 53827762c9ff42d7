"""Guesses without a model: what followed the same tokens before, in the prompt, in the output so far, or in
finished answers.

The places where the text's last tokens have been before vote on what comes next, a longer match counting
more, and those that agree vote on what follows. A guess costs microseconds, so all is done on the event loop
when a commit or a window comes. No torch. Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975; here the
counts are taken at the latest places, which bounds memory and time, where the paper keeps a suffix tree.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from drafter.acceptance_model import AcceptanceModel
from drafter.answers import Answered, Answers
from drafter.proposer import OnChange, OnFailed, Source
from drafter.session import DraftSession, Guess, LogConflict
from drafter.text_index import LONGEST, SHORTEST, TextIndex
from outrider.sampling.ranked import Ranked
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.wire.load import DrafterLoad
from outrider.worker.stepwatch import StepUnderWay

NAME = "suffix"
MOST_TOKENS = 2**20  # of prompt and output together
BLOCK = 16
MOST_GUESSES = 64  # beyond a log, whatever its window
SMOOTHING = 0.1  # weight of one more measured time
STEEPNESS = 4  # a match counts as much as its length to this power


@dataclass(slots=True)
class Place:
    """Where the text's last tokens have been before."""

    next: int  # position of what followed
    matched: int  # tokens before it that are the same
    text: Sequence[int] | None  # a finished answer's; None = the session's own, guesses included


class Text:
    """A session's text with the places that are like its end."""

    def __init__(self, session: DraftSession, answered: Answered | None) -> None:
        self.session = session
        self._index = TextIndex(session.log, session.spec.params.most_tokens)
        self._answered = answered
        self._places: list[Place] = []
        self.look_up()

    def look_up(self) -> None:
        """Finds where the text's end has been before."""
        session = self.session
        tail = [*session.log[-LONGEST:], *(guess.token for guess in session.drafted[-LONGEST:])]
        self._places = [Place(*found, None) for found in self._index.matches(tail)]
        if self._answered is not None:
            self._places += [Place(*found, self._answered.text) for found in self._answered.matches(tail)]

    def extended(self) -> None:
        """The log has grown."""
        self._index.extended()

    def draws(self, count: int) -> list[Ranked]:
        """Returns the next tokens with their shares of the votes, for as long as a place goes on."""
        ahead, draws = [guess.token for guess in self.session.drafted], list[Ranked]()
        while len(draws) < count:
            votes: dict[int, int] = {}
            for place in self._places:
                token = self._at(place, ahead)
                if token is not None:
                    votes[token] = votes.get(token, 0) + place.matched**STEEPNESS
            if not votes:
                break
            token = max(votes, key=lambda one: votes[one])  # of equals the one of the latest place
            draws.append(Ranked((token,), (votes[token] / (sum(votes.values()) + 1),)))
            self._places = [place for place in self._places if self._at(place, ahead) == token]
            for place in self._places:
                place.next += 1
                place.matched += 1
            ahead.append(token)
        return draws

    def _at(self, place: Place, ahead: Sequence[int]) -> int | None:
        """Returns what followed there, `ahead` being what follows the log; None = nothing that the target can
        say."""
        session, position = self.session, place.next
        if place.text is not None:
            end = position >= len(place.text) or place.text[position] >= session.spec.target_vocab_size
            return None if end else place.text[position]
        known = len(session.log)
        return session.log[position] if position < known else ahead[position - known]


class SuffixProposer:
    """How likely a guess is right is learned from all sessions."""

    under_way: StepUnderWay | None = None  # no step is ever under way: nothing waits for one

    def __init__(
        self,
        on_change: OnChange,
        on_failed: OnFailed,
        clock: Callable[[], float],
        answers_bytes: int = 0,
    ) -> None:
        """`answers_bytes`: for finished answers; 0 = none are remembered."""
        self._on_change = on_change
        self._on_failed = on_failed
        self._clock = clock
        self._texts: dict[bytes, Text] = {}
        self._answers = Answers(answers_bytes)
        self._token_seconds = 0.0
        self.busy_seconds = 0.0
        self._rejections = 0
        # By (greedy, tokens of output before it). Noise in the target's draw makes the same match worth less.
        # And an answer seldom begins as the last one did, however long the template before both is.
        self._acceptance = {key: AcceptanceModel() for key in product((True, False), range(SHORTEST + 1))}

    @property
    def load(self) -> DrafterLoad:
        return DrafterLoad(len(self._texts), self._token_seconds, rejections=self._rejections)

    def open(self, session: DraftSession) -> None:
        text = Text(session, self._answers.of(_owner(session)))
        self._texts[session.id] = text
        self._propose(text)

    def close(self, session_id: bytes) -> None:
        text = self._texts.pop(session_id, None)
        if text is not None:
            session = text.session
            self._answers.add(_owner(session), session.log[len(session.spec.params.prompt) :])

    def set_window(self, session_id: bytes, window: int) -> None:
        text = self._texts.get(session_id)
        if text is not None:
            text.session.window = window
            self._propose(text)
            self._tell(text)

    def commit(self, session: DraftSession, base: int, tokens: Sequence[int]) -> None:
        text = self._texts.get(session.id)
        if text is None or text.session is not session:
            return  # closed since
        before = len(session.log)
        unjudged = [] if session.drafted else self._guesses(text, 1)
        try:
            verdict = session.apply(base, tokens)
        except LogConflict as conflict:
            del self._texts[session.id]
            self._on_failed(session, str(conflict))
            return
        for position, (guess, token) in enumerate(verdict.judged, before):
            self._model(session, position).judged(guess, token)
        self._rejections += verdict.rejected
        if unjudged and len(session.log) > before:  # what it would have guessed is a trial, too
            self._model(session, before).judged(unjudged[0], session.log[before])
            session.judge(unjudged[0].token == session.log[before])
        text.extended()
        if not session.drafted:
            text.look_up()
        self._propose(text)
        self._tell(text)

    async def probe(self) -> None:
        TextIndex([1, 2, 1, 2], 4).matches([1, 2])

    async def run(self) -> None:
        await asyncio.Event().wait()  # all is done when it is asked for

    def _propose(self, text: Text) -> None:
        """Adds guesses up to the session's window."""
        session, began = text.session, self._clock()
        window = min(session.window, MOST_GUESSES)
        wanted = min(window - len(session.drafted), session.last - session.length)
        guesses = [] if session.resting else self._guesses(text, wanted)
        for guess in guesses:
            session.extend(guess)
        if guesses:
            seconds = self._clock() - began
            self.busy_seconds += seconds
            weight = SMOOTHING if self._token_seconds else 1
            self._token_seconds += weight * (seconds / len(guesses) - self._token_seconds)

    def _guesses(self, text: Text, count: int) -> list[Guess]:
        """Returns what comes next. The longer the matches, and the more agree, the surer it is."""
        session, depth = text.session, len(text.session.drafted)
        guesses = list[Guess]()
        for ahead, draw in enumerate(text.draws(count), depth):
            model = self._model(session, len(session.log) + ahead)
            guesses += model.guesses([draw], [session.recent], [ahead])
        return guesses

    def _model(self, session: DraftSession, position: int) -> AcceptanceModel:
        """Returns what has learned of such positions."""
        params = session.spec.params
        return self._acceptance[params.sampling.greedy, min(position - len(params.prompt), SHORTEST)]

    def _tell(self, text: Text) -> None:
        if text.session.untold_yet:
            self._on_change([text.session])


def _owner(session: DraftSession) -> tuple[bytes, str]:
    """Returns whose session it is, and of which model: what divides cached prefixes divides answers."""
    return session.spec.params.cache_salt, session.spec.target


def suffix_source(answers_bytes: int = 0) -> Source:
    """Returns suffix lookup as a kind of draft. It suits every tokenizer and every target.

    `answers_bytes`: for finished answers; 0 = none are remembered."""
    incarnation = secrets.randbits(64)
    worker_id = f"drafter-{socket.gethostname()}-{NAME}-{incarnation:016x}"
    identity = Identity(Role.DRAFTER, worker_id, incarnation, NAME, "")
    model = ModelInfo(NAME, NAME, "suffix lookup", 0, 2**31 - 1, MOST_TOKENS, (), "cpu", "none", True)
    return Source(
        WorkerInfo(identity, model, MOST_TOKENS // BLOCK, BLOCK),
        TokenizerFiles("", "", ""),
        lambda on_change, on_failed: SuffixProposer(on_change, on_failed, time.monotonic, answers_bytes),
    )
