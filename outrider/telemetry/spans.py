"""Spans as the roles see them: what took how long, below which, with which events. otlp.py sends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol

from outrider.wire.trace_context import TraceContext

Figures = Mapping[str, str | bool | int | float | Sequence[str]]  # by name, as OpenTelemetry's attributes
NONE: Figures = {}

_current: ContextVar[TraceContext | None] = ContextVar("current", default=None)


class Span(Protocol):
    """What took how long. A span begins when it is made."""

    @property
    def context(self) -> TraceContext:
        """Returns it as the parent of others, also in other processes."""
        ...

    def rename(self, name: str) -> None: ...
    def set(self, figures: Figures) -> None: ...
    def event(self, name: str, figures: Figures = NONE) -> None: ...
    def end(self, error: str = "") -> None:
        """Ends the span, well or with an error of that kind."""
        ...


class Tracer(Protocol):
    def start(
        self, name: str, parent: TraceContext | None, figures: Figures = NONE, server: bool = False
    ) -> Span:
        """Returns a span that begins now; without a parent it begins a trace. `server`: it answers what
        another process asked for."""
        ...


def current_trace() -> TraceContext | None:
    """Returns the span to which belongs what is done in this task; None = there is no trace."""
    return _current.get()


def set_current_trace(context: TraceContext | None) -> None:
    """Holds from now on, in this task and those that it starts."""
    _current.set(context)
