"""One session: its transcript, and the verifier that has it.

Everything is decided when an event arrives, whether or not a client reads: one at a time, from its beginning.
"""

from __future__ import annotations

import asyncio
import logging

from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NoneInTime,
    OutriderError,
    Superseded,
    Unavailable,
    superseded,
)
from outrider.wire.session import FinishReason, SessionId
from outrider.wire.verifier_sessions import Committed
from router import losses, numerics
from router.fleet import Fleet
from router.held_logs import TakenSession
from router.rebalance import Unbegun
from router.requests import SessionEnded, TokensCommitted
from router.session_draft import SessionDraft
from router.session_log_writer import SessionLogWriter
from router.session_state import TRANSITIONS, Event, State
from router.standings import LEAST_PATIENCE_SECONDS, Waited
from router.transcript import Transcript
from router.workers import Verifier

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # between two looks at a session's verifier


class Session:
    """Open from its reader's first wait until an end or an error, or `close`.

    Both of its workers may be lost at any time: it goes on with others, from what is committed. The same seed
    gives the same tokens there."""

    def __init__(
        self,
        draft: SessionDraft,
        transcript: Transcript,
        log_writer: SessionLogWriter,
        fleet: Fleet,
        taken: TakenSession | None = None,
        same_numerics: bool = False,
    ) -> None:
        """`taken`: the log that it goes on with; None = it begins one. `same_numerics`: rather than with
        others it waits."""
        request = transcript.request
        assert request.session_id is not None and request.fingerprint is not None, "named when it is admitted"
        self.id: SessionId = request.session_id
        self._fingerprint: str = request.fingerprint
        self.transcript = transcript
        self._request = request
        self._log_writer = log_writer
        self.cursor = (
            log_writer.begin(transcript, self._superseded)
            if taken is None
            else log_writer.go_on(taken, self._superseded)
        )
        self._verifier: Verifier | None = None  # None = not opened yet, or lost and not replaced yet
        self._losses = losses.Losses()
        self._pause: asyncio.TimerHandle | None = None  # until it seeks another verifier
        self._lost: frozenset[tuple[str, int]] = frozenset()  # verifiers where it was lost: others come first
        self._state = State.NEW
        self._deadline: asyncio.TimerHandle | None = None  # while there is no verifier
        self._expiry: asyncio.TimerHandle | None = None  # where the request has a deadline
        self._asking: asyncio.Task[None] | None = None  # the log, whose it is
        self._look: asyncio.TimerHandle | None = None  # at whether its verifier commits anything
        self._still = Waited(LOOK_SECONDS)  # since its verifier's last token, or since it was placed
        self._brought = 0  # what that one had brought all sessions, at the first look since then
        self._fleet = fleet
        self.draft = draft
        self._same_numerics = same_numerics
        self.begun_at = asyncio.get_running_loop().time()
        self.outcome: SessionEnded | OutriderError | None = None  # None = it goes on
        self.reader: object = None  # who reads it now
        self.news = asyncio.Event()  # for readers

    def read_by(self, reader: object) -> None:
        """Gives the session another reader, and wakes the former one."""
        self.reader = reader
        self.news.set()

    @property
    def broken_off(self) -> bool:
        """Returns whether it ended before its text did: its log can be gone on with."""
        return isinstance(self.outcome, OutriderError) and not isinstance(self.outcome, Cancelled)

    def open(self) -> bool:
        """Seeks its workers; False where that has begun already."""
        if self._state is not State.NEW:
            return False
        self._note(Event.READ)
        self.seek_verifier()
        if self._verifier is None:
            self._await_verifier()
        return True

    @property
    def unplaced(self) -> bool:
        """Whether no verifier has it, and it is not over."""
        return self._verifier is None and self.outcome is None

    def seek_verifier(self) -> None:
        """Gives the session a verifier, and with it a drafter, if it seeks one and one runs its model."""
        if self._state not in (State.SEEKING, State.GIVEN_BACK) or self._pause is not None:
            return
        verifier = self._fleet.verifier_for(self.transcript, self._same_numerics, self._lost)
        if verifier is None or verifier.identity.model_fingerprint != self._fingerprint:
            return
        self._verifier = verifier
        self._note(Event.PLACED)
        self._fleet.standings.placed(verifier, self._request.owner)
        self._look_again()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        verifier.open(
            self.id,
            self._request.params,
            output=self.transcript.output,
            num_speculative_tokens=self.draft.begin(verifier),
            draft_key=self.draft.key,
            trace=self.draft.trace,
            listener=self,
        )
        self.draft.start()

    @property
    def unbegun(self) -> Unbegun | None:
        """Returns it as it waits at its verifier, or seems to; None where it does not, or has moved for that
        before: it does so once, lest it goes to and fro."""
        if self._verifier is None or self._state not in (State.WAITING, State.ASKED_BACK):
            return None
        worker_id, tokens = self._verifier.identity.worker_id, len(self.transcript.log)
        most, asked_back = self._request.params.most_tokens, self._state is State.ASKED_BACK
        return Unbegun(worker_id, tokens, most, asked_back, self.transcript.numerics)

    def ask_back(self) -> None:
        """Has it move to another verifier, unless it has begun where it is."""
        if self._verifier is not None and self._state is State.WAITING:
            self._note(Event.ASKED)
            self._verifier.ask_back(self.id)

    def expire_at(self, deadline: float | None) -> None:
        """Ends it then, on the event loop's clock (None = never); its log can be gone on with."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = None
        if deadline is not None:
            self._expiry = asyncio.get_running_loop().call_at(deadline, self._expire)
        elif self._state in (State.SEEKING, State.GIVEN_BACK) and self._deadline is None:
            self._await_verifier()  # it was to wait as long as its former client

    def _expire(self) -> None:
        if self._verifier is None and not self.transcript.steps:
            self._end(NoneInTime("no target worker came in the time that the client waits; try again later"))
            return
        self._end(DeadlineExceeded(f"the request was not finished by its deadline{self._missing_numerics}"))

    @property
    def _missing_numerics(self) -> str:
        waits = self._verifier is None and self._same_numerics
        return numerics.missing(self.transcript.numerics, waits)

    def close(self) -> None:
        """Frees the session on every worker that still has it, at once."""
        if self._state is State.OVER:
            return
        if self._verifier is not None and isinstance(self.outcome, DeadlineExceeded | None):
            self._still.heard(self._verifier.load, self._unread)
            self._fleet.standings.left(self._verifier, self._request.owner, self._still)
        self._note(Event.ENDED)
        for timer in (self._expiry, self._deadline, self._pause, self._look):
            if timer is not None:
                timer.cancel()
        if self._verifier is not None:
            self._verifier.close(self.id)
            self._fleet.standings.gone(self._verifier, self._request.owner)
        self.draft.close(self.outcome)
        self._log_writer.close(self.cursor)

    def _note(self, event: Event) -> None:
        if (span := self.draft.span) is not None:
            span.note(event, "" if self._verifier is None else self._verifier.identity.worker_id)
        self._state = TRANSITIONS[self._state, event]

    def committed(self, told: Committed) -> bool:
        if not self._state.placed:
            return False
        base, known = (
            told.base,
            len(self.transcript.log) - told.base,
        )  # tokens of it that are committed already
        vocab_size = self._verifier.registration.info.model.vocab_size if self._verifier is not None else 0
        if fault := self.transcript.fault_in(told, vocab_size):
            self._broke("lied", fault)
            return False
        if known >= len(told.tokens):
            return False
        new = told.after(known) if known else told
        here = self._verifier.numerics if self._verifier is not None else ""
        # At a second verifier it is the first one's work that is, or is not, found in a cache.
        most_cached = base if base == len(self._request.params.prompt) else 0
        step = TokensCommitted(
            tokens=tuple(new.tokens),
            accepted=new.accepted,
            verified=new.verified,
            cached_prompt_tokens=min(new.cached_prompt_tokens, most_cached),
            numerics=numerics.news(self.transcript.numerics, here),
            logprobs=new.logprobs,
            guesses=new.guesses,
            prompt=None if self.transcript.steps else new.prompt,  # at a second verifier it may come again
            beside=new.beside,
            own=new.own,
            drafters=self.draft.named(new.drafters) if new.drafters else (),
            seconds=self._seconds if self._request.params.guesses else None,
        )
        if step.numerics and self.transcript.numerics:
            self._fleet.numerics_changed(self.id, self.transcript, here)
        self._losses.gained()
        self._still.moved()
        if self._verifier is not None:
            self._verifier.brought += 1
        if self._state is not State.RUNNING or self.draft.span is not None:
            if self._state is not State.RUNNING and self._verifier is not None:
                self._fleet.standings.served(self._verifier, self._request.owner)
            self._note(Event.TOKENS)
        self.transcript.add(step)
        self._log_writer.note(self.cursor)
        self.news.set()
        self.draft.committed(step)
        return True

    def finished(self, reason: FinishReason) -> None:
        if self.transcript.ends(reason):
            if self._verifier is not None:
                self._fleet.standings.finished(self._verifier, self._request.owner)
            self._end(SessionEnded(reason))
        else:
            self._broke("lied", "it ends a text before its end, or without a reason")

    def failed(self, error: OutriderError) -> None:
        if isinstance(error, Cancelled | Superseded):
            self._asking = asyncio.create_task(self._ask_log(self._verifier))
        elif not isinstance(error, Unavailable):
            refused = isinstance(error, InvalidRequest)
            if not (refused and self._request.params.grammar):  # which takes too much
                self._note_failure()
            self._leave_verifier(error if refused else Unavailable(error.message))
        elif self._state is State.ASKED_BACK or (self._verifier is not None and self._verifier.load.draining):
            self._move(Event.RETURNED)  # one that leaves gives all back: that says nothing of the request
        else:
            self._note_failure()
            self.verifier_lost()

    async def _ask_log(self, verifier: Verifier | None) -> None:
        """Its verifier says that it is cancelled, or another router's: so it is if its log says so."""
        claim, mine = await self._log_writer.claim(self.cursor), self.cursor.owner
        if self._verifier is not verifier or not self._state.placed:
            return
        if claim is not None and claim.cancelled:
            self.cancel()
        elif claim is not None and claim.owner != mine and claim.owner.generation >= mine.generation:
            self._superseded()
        else:
            if not mine.generation:  # else a router that had it before may have opened it there late
                self._note_failure()
            self.verifier_lost()

    def _note_failure(self) -> None:
        """Holds it against a verifier, the first time: what one fails at twice may be the request's fault."""
        verifier = self._verifier
        if verifier is not None and verifier.instance not in self._lost:
            self._fleet.standings.failed(verifier, self._request.owner, self._state is State.RUNNING)

    def _broke(self, reason: str, why: str, owner: str = "") -> None:
        """Its verifier has done what no sound one does."""
        if self._verifier is not None:
            self._fleet.standings.broke(self._verifier, reason, why, owner)
            self._leave_verifier(losses.lost_track())

    def _leave_verifier(self, error: OutriderError) -> None:
        """Goes on at another verifier, if there is one; else ends with the error."""
        lost = self._lost if self._verifier is None else self._lost | {self._verifier.instance}
        other = self._fleet.verifier_for(self.transcript, self._same_numerics, lost)
        if self.transcript.reached is None and (other is None or other.instance in lost):
            self._end(error)
        else:
            self.verifier_lost()

    @property
    def _seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.begun_at

    @property
    def _unread(self) -> int:
        return 0 if self._state is State.RUNNING else len(self.transcript.log)

    def _look_again(self) -> None:
        self._still.moved()
        self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._judge)

    def _judge(self) -> None:
        """Leaves a verifier that has not committed anything for longer than any sound one needs."""
        self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._judge)
        verifier = self._verifier
        if verifier is None or self._request.params.priority > 0:  # who gives way may stand still for long
            return
        if not self._still.seconds:
            self._brought = verifier.brought
        self._still.tick()
        self._still.heard(verifier.load, self._unread)
        if self._still.too_long(LEAST_PATIENCE_SECONDS):
            if verifier.load.waiting and verifier.brought != self._brought:  # others come before it
                self._leave_verifier(losses.no_room())
                return
            # A grammar may take long to follow, and a prompt to read.
            slow = self._request.params.grammar or (self._still.longest and not verifier.load.waiting)
            whose = self._request.owner if slow else ""
            self._broke("stalled", "nothing is committed of a session that it has", whose)

    def verifier_lost(self) -> None:
        """The session goes on at another verifier, unless it may be what they die of."""
        if self._verifier is not None:
            self._lost |= {self._verifier.instance}
        pause, too_many = self._losses.lost(asyncio.get_running_loop().time()), self._losses.too_many
        if too_many is None:
            self._move(Event.LOST, pause)
        else:
            self._end(too_many)

    def _move(self, why: Event, pause: float = 0.0) -> None:
        """Goes on at another verifier, after so many seconds or as soon as there is one."""
        if not self._state.placed:
            return
        self._note(why)
        if self._look is not None:
            self._look.cancel()
        if self._verifier is not None:
            self._verifier.close(self.id)  # unless it has forgotten it
            self._fleet.standings.gone(self._verifier, self._request.owner)
        self._verifier = None
        if (reached := self.transcript.reached) is not None:
            self._end(SessionEnded(reached))
            return
        self.draft.pause()
        log.info("session %s: no verifier after %d tokens", self.id.hex(), self.transcript.output_tokens)
        if pause:
            self._pause = asyncio.get_running_loop().call_later(pause, self._go_on)
        self._fleet.turns.soon(self.seek_verifier)  # other sessions, too: long texts take milliseconds each
        self._await_verifier()

    def _go_on(self) -> None:
        self._pause = None
        self._fleet.turns.soon(self.seek_verifier)

    def _await_verifier(self) -> None:
        missing = self._missing_numerics
        if missing and self._expiry is not None:
            return  # it waits as long as its client does
        none_came = losses.none_came(missing, served=bool(self._lost or self.transcript.steps))
        self._deadline = asyncio.get_running_loop().call_later(losses.RESUME_SECONDS, self._end, none_came)

    def cancel(self) -> None:
        self._end(losses.cancelled())

    def stop(self) -> None:
        """The router is about to go."""
        self._end(Unavailable("the service is stopping; send the request again"))

    def _superseded(self) -> None:
        """Another router goes on with it."""
        self._end(superseded())

    def _end(self, outcome: SessionEnded | OutriderError) -> None:
        """An end or a cancellation is final, and logged; after any other error somebody may go on."""
        if self._state is State.OVER:
            return
        self.outcome = outcome
        if isinstance(outcome, SessionEnded):
            self.transcript.end = outcome.reason
        elif isinstance(outcome, Cancelled):
            self.transcript.end = FinishReason.CANCELLED
        self._log_writer.note(self.cursor)
        self.news.set()
        self.close()

    def drafter_cut_off(self, turn: int, reason: str) -> None:
        self.draft.cut_off(turn, reason)
