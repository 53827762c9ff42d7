"""A collector of the test's own: it takes what is sent by OTLP over HTTP, and keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent


@dataclass(frozen=True)
class Span:
    """As it came, and whose it is."""

    sent: Sent
    resource: dict[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        return values(self.sent.attributes)

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [(one.name, values(one.attributes)) for one in self.sent.events]

    @property
    def role(self) -> str:
        return str(self.resource["service.name"]).removeprefix("outrider-")


@dataclass
class Receiver:
    """`with Receiver() as receiver`: it listens at `url`."""

    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)  # the last of each name
    requests: int = 0
    answer: Callable[[], int] = lambda: 200  # the status of its answers
    head: dict[str, str] = field(default_factory=dict)  # that they have
    says: Callable[[], Iterable[bytes]] = tuple  # their bodies

    def __enter__(self) -> Receiver:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests += 1
                status = receiver.answer()
                if status == 200:
                    receiver.take(self.path, body)
                self.send_response(status)
                for name, value in receiver.head.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):
                    for piece in receiver.says():
                        self.wfile.write(piece)

            def log_message(self, *about: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        """From now on nobody listens there."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for of in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = values(of.resource.attributes)
                self.spans += [Span(span, resource) for each in of.scope_spans for span in each.spans]
        elif path == "/v1/metrics":
            for told in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.metrics |= {one.name: one for each in told.scope_metrics for one in each.metrics}

    def of_trace(self, trace_id: str) -> list[Span]:
        return [one for one in list(self.spans) if one.sent.trace_id.hex() == trace_id]


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
