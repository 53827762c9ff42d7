"""The spans of a drafter: one for each session, as long as it drafts for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafter.session import DraftSession
from outrider.telemetry.spans import Figures, Span

if TYPE_CHECKING:
    from outrider.telemetry.otlp import Otlp


class DraftSpans:
    """Tells nothing if nobody asks for spans."""

    def __init__(self, tracer: Otlp | None, model: str) -> None:
        """`tracer` ends with it; None = nobody asks. `model`: the draft's name."""
        self._tracer = tracer
        self._model = model
        self._open: dict[bytes, tuple[DraftSession, Span]] = {}  # by session

    def begin(self, session: DraftSession, verifier_address: str) -> None:
        if self._tracer is None:
            return
        told: Figures = {
            "outrider.session.id": session.id.hex(),
            "gen_ai.request.model": self._model,
            "outrider.verifier.address": verifier_address,
            "outrider.tokens_before": len(session.spec.output),
        }
        self._open[session.id] = session, self._tracer.start("draft", session.spec.trace, told)

    def given_up(self, session_id: bytes, reason: str) -> None:
        """The drafter ends it by itself."""
        if session_id in self._open:
            self._open[session_id][1].event("given up", {"outrider.reason": reason})

    def over(self, session_id: bytes) -> None:
        if session_id not in self._open:
            return
        session, span = self._open.pop(session_id)
        before = len(session.spec.params.prompt) + len(session.spec.output)
        followed = {"outrider.tokens_followed": len(session.log) - before}
        span.set({**followed, "outrider.acceptance": session.recent})
        span.end()

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
