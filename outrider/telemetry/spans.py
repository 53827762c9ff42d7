"""Spans as the roles see them: what took how long, below which, with which events. otlp.py sends them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from outrider.options.telemetry import EXTRA, Export, exporters_installed
from outrider.wire.trace_context import TraceContext

if TYPE_CHECKING:
    from outrider.telemetry.otlp import Otlp
    from outrider.wire.hello import Identity

log = logging.getLogger(__name__)

Figures = Mapping[str, str | bool | int | float | Sequence[str]]  # by name, as OpenTelemetry's attributes
NONE: Figures = {}

_current: ContextVar[TraceContext | None] = ContextVar("current", default=None)


class Span(Protocol):
    """It begins when it is made."""

    @property
    def context(self) -> TraceContext:
        """Returns it as the parent of others, also in other processes."""
        ...

    def rename(self, name: str) -> None: ...
    def set(self, figures: Figures) -> None: ...
    def event(self, name: str, figures: Figures = NONE) -> None: ...
    def end(self, error: str = "") -> None:
        """It is over, well or with an error of that kind."""
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


def tracer_of(export: Export, identity: Identity) -> Otlp | None:
    """Returns what sends this process's spans to a collector; None = nobody wants them."""
    if not export.wanted:
        return None
    if not exporters_installed():
        log.warning("the environment names a collector (OTEL_EXPORTER_OTLP_ENDPOINT): install %s", EXTRA)
        return None
    from outrider.telemetry.otlp import Otlp

    return Otlp(export.otlp_endpoint, identity)
