"""A session's spans at a verifier: `queue` until it is begun, `prefill` until its first token, then `decode`.

One span each, however many steps; what is out of the ordinary is an event.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.telemetry.spans import Figures, Span, Tracer
from outrider.wire.trace_context import TraceContext
from verifier.session import Outcome, SessionSpec

STALL_SECONDS = 1.0  # between two steps of a session: a longer time is told


class SessionTrace:
    def __init__(
        self,
        tracer: Tracer,
        parent: TraceContext | None,
        spec: SessionSpec,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self._tracer = tracer
        self._parent = parent
        self._clock = clock
        self._about: Figures = {"outrider.session.id": spec.session_id.hex(), "gen_ai.request.model": model}
        self._prompt = len(spec.params.prompt) + len(spec.output)
        self._span: Span = tracer.start("queue", parent, self._about)
        self._decoding = False
        self._last = 0.0  # when the last step was settled
        self._steps = self._tokens = self._accepted = self._verified = self._stalls = 0
        self._finish = ""

    def begun(self, cached: int) -> None:
        """A step is about to read it. `cached`: tokens of its log that were found in the cache."""
        self._next("prefill")
        read = {"gen_ai.usage.input_tokens": self._prompt, "gen_ai.usage.cache_read.input_tokens": cached}
        self._span.set(read)

    def preempted(self) -> None:
        """What was computed of it made room for others: it is read again."""
        self._span.event("preempted", {"outrider.tokens": self._tokens})

    def adopted(self) -> None:
        """Another router has it now, or its own has it again."""
        self._span.event("adopted", {"outrider.tokens": self._tokens})

    def committed(self, outcome: Outcome) -> None:
        now = self._clock()
        if not self._decoding:
            self._decoding = True
            self._next("decode")
        elif now - self._last > STALL_SECONDS:
            self._stalls += 1
            told = {"outrider.seconds": now - self._last, "outrider.tokens": self._tokens}
            self._span.event("stall", told)
        self._last = now
        self._steps += 1
        self._tokens += len(outcome.tokens)
        self._accepted += outcome.accepted
        self._verified += outcome.verified + outcome.beside
        if outcome.finish is not None:
            self._finish = outcome.finish.openai

    def over(self, failed: bool = False) -> None:
        """Ends the spans: the session is over, its router closes it, or it goes on elsewhere."""
        self._span.set(
            {
                "gen_ai.usage.output_tokens": self._tokens,
                "outrider.steps": self._steps,
                "outrider.draft_tokens": self._verified,
                "outrider.accepted_tokens": self._accepted,
                "outrider.stalls": self._stalls,
            }
        )
        if self._finish:
            self._span.set({"gen_ai.response.finish_reasons": [self._finish]})
        self._span.end("error" if failed else "")

    def _next(self, name: str) -> None:
        self._span.end()
        self._span = self._tracer.start(name, self._parent, self._about)
