"""Sends spans, and the metrics of a registry, to a collector by OTLP. It needs outrider[otel].

Threads of its own speak to the collector, and what waits for them is bounded: where that is slow or gone,
spans are dropped and counted, and nobody who serves waits. OpenTelemetry's variables say all the rest.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import requests
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from prometheus_client import CollectorRegistry

from outrider import __version__
from outrider.telemetry.otlp_messages import encode_spans
from outrider.telemetry.otlp_metrics import MetricsSender
from outrider.telemetry.spans import NONE, Figures
from outrider.wire.hello import Identity
from outrider.wire.trace_context import TraceContext

log = logging.getLogger(__name__)

MOST_WAITING = 2048  # spans; by the specification
MOST_EVENTS = 128  # of a span, the last; likewise
RANDOM = 0x02  # of a trace's flags: its id is (W3C Trace Context, level 2)
PARTING_SECONDS = 2.0  # that a process waits for a collector when it ends
HTTP, GRPC = "http/protobuf", "grpc"
SCOPE = InstrumentationScope("outrider", __version__)
FINE, FAILED = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
PROVIDER = "_CREDENTIAL_PROVIDER"  # variables that name where sessions of requests come from, instead


class OtlpSpan:
    """Implements outrider.telemetry.spans.Span. It notes what it is told, and becomes a span of the SDK's at
    its end: one that is that from its start on takes four times as long."""

    __slots__ = ("_began", "_context", "_events", "_figures", "_kind", "_name", "_otlp", "_parent", "_status")

    def __init__(
        self, otlp: Otlp, name: str, kind: SpanKind, context: SpanContext, parent: SpanContext | None
    ) -> None:
        self._otlp = otlp
        self._name = name
        self._kind = kind
        self._context = context
        self._parent = parent
        self._figures: dict[str, Any] = {}
        self._events: BoundedList[Event] = BoundedList(MOST_EVENTS)
        self._status = FINE
        self._began = time.time_ns()

    @property
    def context(self) -> TraceContext:
        it = self._context
        return TraceContext(it.trace_id, it.span_id, it.trace_flags, it.trace_state.to_header())

    def rename(self, name: str) -> None:
        self._name = name

    def set(self, figures: Figures) -> None:
        self._figures |= figures

    def event(self, name: str, figures: Figures = NONE) -> None:
        self._events.append(Event(name, figures))

    def end(self, error: str = "") -> None:
        if error:
            self._figures["error.type"] = error
            self._status = FAILED
        if self._context.trace_flags.sampled:
            self._otlp.ended(self)

    def readable(self, resource: Resource) -> ReadableSpan:
        """Returns it as it is now, at its end."""
        return ReadableSpan(
            self._name,
            self._context,
            self._parent,
            resource,
            self._figures,
            self._events,
            kind=self._kind,
            status=self._status,
            start_time=self._began,
            end_time=time.time_ns(),
            instrumentation_scope=SCOPE,
        )


class Otlp:
    """Implements outrider.telemetry.spans.Tracer. Belongs to a process, of whichever role."""

    def __init__(self, endpoint: str | None, identity: Identity) -> None:
        """`endpoint`: URL of the collector; None = the environment has it."""
        role = identity.role.name.lower()
        told = {
            "service.namespace": "outrider",
            "service.name": f"outrider-{role}",
            "service.instance.id": identity.worker_id,
            "service.version": __version__,
        }
        self._resource = Resource.create(told).merge(OTELResourceDetector().detect())
        self._endpoint = endpoint
        # They would have several lines for each batch that fails; there is one for the first.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        # As OTEL_TRACES_SAMPLER says.
        self._sampler = TracerProvider(resource=self._resource, shutdown_on_exit=False).sampler
        self._ids = RandomIdGenerator()
        self._queue: _Bounded | None = None
        if exporter := _exporter("trace", "OTLPSpanExporter", endpoint):
            self._queue = _Bounded(exporter)
        self._metrics: MetricsSender | None = None

    @property
    def dropped(self) -> int:
        """Returns how many spans the collector did not get."""
        return 0 if self._queue is None else self._queue.dropped

    def start(
        self, name: str, parent: TraceContext | None, figures: Figures = NONE, server: bool = False
    ) -> OtlpSpan:
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        known, about = _below(parent)
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        found = self._sampler.should_sample(about, trace_id, name, kind, figures)
        random = RANDOM if parent is None else parent.flags & RANDOM
        sampled = found.decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(random | (TraceFlags.SAMPLED if sampled else 0))
        own = self._ids.generate_span_id()
        span = OtlpSpan(self, name, kind, SpanContext(trace_id, own, False, flags, found.trace_state), known)
        span.set(found.attributes)
        return span

    def ended(self, span: OtlpSpan) -> None:
        """Takes a sampled span to be sent."""
        if self._queue is not None:
            self._queue.take(span.readable(self._resource))

    def send_metrics(self, registry: CollectorRegistry) -> None:
        """Sends them from now on, as often as OTEL_METRIC_EXPORT_INTERVAL says."""
        if exporter := _exporter("metric", "OTLPMetricExporter", self._endpoint):
            self._metrics = MetricsSender(exporter, self._resource, registry)

    def close(self) -> None:
        """Sends what is there, if the collector takes it in time."""
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        ending.join(PARTING_SECONDS)

    def _end(self) -> None:
        if self._queue is not None:
            self._queue.shutdown()
        if self._metrics is not None:
            self._metrics.close()


class _Bounded:
    """Takes so many spans until they are sent, and drops those that are too many."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._most = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or MOST_WAITING)
        self._lock = threading.Lock()
        self._waiting = 0
        self.dropped = 0
        self._batches = BatchSpanProcessor(_Counted(exporter, self))

    def take(self, span: ReadableSpan) -> None:
        with self._lock:
            if self._waiting >= self._most:
                self.dropped += 1
                return
            self._waiting += 1
        self._batches.on_end(span)

    def sent(self, count: int, arrived: bool) -> None:
        with self._lock:
            self._waiting -= count
            self.dropped += 0 if arrived else count

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]


class _Counted(SpanExporter):
    """An exporter that tells what became of spans: to the queue, and once to the log."""

    def __init__(self, exporter: SpanExporter, queue: _Bounded) -> None:
        self._exporter = exporter
        self._queue = queue
        self._away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            arrived = result is SpanExportResult.SUCCESS
            self._queue.sent(len(spans), arrived)
            if arrived and self._away:
                log.warning("the collector takes spans again; %d were dropped", self._queue.dropped)
            elif not arrived and not self._away:
                log.warning(
                    "the collector does not take spans: they are dropped until it does. They are sent by %s, "
                    "as OTEL_EXPORTER_OTLP_PROTOCOL says",
                    _protocol("TRACES"),
                )
            self._away = not arrived
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Curt(requests.Session):
    """Hears of an answer no more than its head: requests would hold all of a body, unpacked, and wait for its
    end. It goes nowhere else: what is sent, and with which key, is for the collector that was named."""

    def request(self, *about: Any, **more: Any) -> requests.Response:
        answer = super().request(*about, **{**more, "stream": True, "allow_redirects": False})
        answer.close()
        answer.raw = io.BytesIO()
        if answer.is_redirect:
            answer.status_code = 400  # exporters take it for a success
        return answer


def _below(parent: TraceContext | None) -> tuple[SpanContext | None, Context]:
    if parent is None:
        return None, Context()
    state = TraceState.from_header([parent.state]) if parent.state else None
    known = SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(parent.flags), state)
    return known, set_span_in_context(NonRecordingSpan(known), Context())


def _protocol(signal: str) -> str:
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or general or HTTP


def _exporter(signal: str, name: str, endpoint: str | None) -> Any:
    """Returns an exporter of OpenTelemetry's; None = its variables want none of this signal."""
    variable = f"{signal}s".upper()
    if os.environ.get(f"OTEL_{variable}_EXPORTER", "").strip().lower() == "none":
        return None
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{variable}_ENDPOINT")
    if endpoint is None and not own and not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return None
    kind = "grpc" if _protocol(variable) == GRPC else "http"
    module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.{signal}_exporter")
    exporter = getattr(module, name)
    if signal == "trace":
        module.encode_spans = encode_spans  # type: ignore[attr-defined]  # exporters take none as a parameter
    more: dict[str, Any] = {}
    if kind == "http" and not any("HTTP" in name and name.endswith(PROVIDER) for name in os.environ):
        more["session"] = _Curt()
    if endpoint is not None:
        more["endpoint"] = endpoint if kind == "grpc" else f"{endpoint.rstrip('/')}/v1/{signal}s"
    return exporter(**more)
