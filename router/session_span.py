"""A session's span: where it was, who drafted for it, and when it stood still."""

from __future__ import annotations

from collections.abc import Callable

from outrider.errors import OutriderError
from outrider.telemetry.spans import Tracer
from outrider.wire.trace_context import TraceContext
from router.requests import SessionEnded
from router.session_state import Event
from router.transcript import Transcript

STALL_SECONDS = 1.0  # between two steps of a session: a longer time is told


class SessionSpan:
    """Belongs to one router. A session that goes on at another one has another there."""

    def __init__(
        self, tracer: Tracer, parent: TraceContext | None, transcript: Transcript, clock: Callable[[], float]
    ) -> None:
        request = transcript.request
        self._transcript = transcript
        self._clock = clock
        self._last: float | None = None  # when the last step was heard of, at this verifier
        self._moves = self._stalls = 0
        self._first = transcript.output_tokens == 0  # whether the first token is still to come
        assert request.session_id is not None, "named when it is admitted"
        self._span = tracer.start(
            "session",
            parent,
            {
                "outrider.session.id": request.session_id.hex(),
                "gen_ai.request.model": request.model,
                "gen_ai.usage.input_tokens": len(request.params.prompt),
                "outrider.tokens_before": transcript.output_tokens,
            },
        )
        self.context = self._span.context

    def note(self, event: Event, verifier: str) -> None:
        """Takes in what has become of it. `verifier`: where it is."""
        if event is Event.TOKENS:
            self._stepped()
        elif event is Event.PLACED:
            self._tell("placed", verifier)
        elif event in (Event.LOST, Event.RETURNED):
            self._moves += 1
            self._last = None
            self._tell("lost" if event is Event.LOST else "given back", verifier)

    def _stepped(self) -> None:
        now, before = self._clock(), self._last
        self._last = now
        if self._first:
            self._first = False
            self._span.event("first token")
        if before is not None and now - before > STALL_SECONDS:
            self._stalls += 1
            told = {"outrider.seconds": now - before, "outrider.tokens": self._transcript.output_tokens}
            self._span.event("stall", told)

    def _tell(self, what: str, verifier: str) -> None:
        tokens = self._transcript.output_tokens
        self._span.event(what, {"outrider.verifier": verifier, "outrider.tokens": tokens})

    def drafter(self, what: str, drafter: str, why: str = "") -> None:
        """A drafter comes or goes."""
        self._span.event(what, {"outrider.drafter": drafter, **({"outrider.reason": why} if why else {})})

    def over(self, outcome: SessionEnded | OutriderError | None) -> None:
        """`outcome`: None = its reader needs no more of it, or has left."""
        if isinstance(outcome, SessionEnded):
            self._span.set({"gen_ai.response.finish_reasons": [outcome.reason.openai]})
        self._span.set(
            {
                "gen_ai.usage.output_tokens": self._transcript.output_tokens,
                "outrider.steps": self._transcript.steps,
                "outrider.moves": self._moves,
                "outrider.stalls": self._stalls,
            }
        )
        self._span.end(outcome.kind if isinstance(outcome, OutriderError) else "")
