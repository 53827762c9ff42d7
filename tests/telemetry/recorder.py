"""A tracer that keeps its spans, for tests that look at what is told and not at how it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.telemetry.spans import NONE, Figures
from outrider.wire.trace_context import TraceContext


@dataclass
class Span:
    name: str
    parent: TraceContext | None
    context: TraceContext
    figures: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # the errors with which it ended: one, if all is well

    def rename(self, name: str) -> None:
        self.name = name

    def set(self, figures: Figures) -> None:
        self.figures |= figures

    def event(self, name: str, figures: Figures = NONE) -> None:
        self.events.append((name, dict(figures)))

    def end(self, error: str = "") -> None:
        self.ended.append(error)


class Recorder:
    """Implements outrider.telemetry.spans.Tracer."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start(
        self, name: str, parent: TraceContext | None, figures: Figures = NONE, server: bool = False
    ) -> Span:
        number = len(self.spans) + 1
        context = TraceContext(99 if parent is None else parent.trace_id, number, 1)
        self.spans.append(Span(name, parent, context, dict(figures)))
        return self.spans[-1]
