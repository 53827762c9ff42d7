"""Spans on their way to a collector: by both protocols, and where it is slow, gone, or nobody wants them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import repeat
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.errors import StartupError
from outrider.options import telemetry
from outrider.options.telemetry import Export, named_in
from outrider.telemetry import otlp as otlp_module
from outrider.telemetry import otlp_messages, tracing
from outrider.telemetry.otlp import Otlp, OtlpSpan
from outrider.telemetry.otlp_metrics import converted
from outrider.telemetry.tracing import tracer_of
from outrider.wire.hello import Identity, Role
from outrider.wire.trace_context import TraceContext
from tests.cluster.process import ROOT
from tests.telemetry.receiver import Receiver, values

ME = Identity(Role.DRAFTER, "d", 1)
PARENT = TraceContext(7, 8, 1, "a=1,b=2")
SECONDS = 60.0  # only a hang can reach it


def eventually(holds: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    level = logging.getLogger("opentelemetry").level
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(SECONDS))
    monkeypatch.setattr(otlp_module, "PARTING_SECONDS", SECONDS)  # on a busy machine two may be too few
    yield
    logging.getLogger("opentelemetry").setLevel(level)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def test_a_span_comes_with_its_parent_its_figures_and_its_events(receiver: Receiver) -> None:
    otlp = Otlp(receiver.url, ME)
    span = otlp.start("one", PARENT, {"a": 1}, server=True)
    below = otlp.start("two", span.context)
    below.rename("other")
    below.event("stall", {"seconds": 1.5})
    below.set({"reasons": ["x", "y"]})
    below.end("timeout")
    span.end()
    otlp.close()
    by_name = {one.sent.name: one for one in receiver.spans}
    one, other = by_name["one"], by_name["other"]
    assert one.sent.parent_span_id.hex() == f"{PARENT.span_id:016x}" and one.sent.trace_state == "a=1,b=2"
    assert other.sent.parent_span_id == one.sent.span_id and other.sent.trace_id == one.sent.trace_id
    assert (one.figures, one.sent.kind) == ({"a": 1}, one.sent.SPAN_KIND_SERVER)
    assert other.figures == {"reasons": ["x", "y"], "error.type": "timeout"}
    assert other.sent.status.code == other.sent.status.STATUS_CODE_ERROR
    assert other.events == [("stall", {"seconds": 1.5})]
    assert one.resource["service.name"] == "outrider-drafter" and one.resource["service.instance.id"] == "d"
    assert otlp.dropped == 0


def test_spans_are_encoded_as_by_opentelemetry_itself() -> None:
    otlp, ended = Otlp(None, ME), list[OtlpSpan]()
    otlp.ended = ended.append  # type: ignore[method-assign]
    figures = {"text": "ä", "yes": True, "one": 1, "half": 0.5, "none": [], "some": ["x", "y"], "seed": 2**64}
    for parent, server in ((PARENT, True), (None, False), (TraceContext(7, 8, 3), False)):
        span = otlp.start("one", parent, figures, server)
        span.event("two", figures)
        span.event("three")
        span.end("timeout" if server else "")
    told = [span.readable(otlp._resource) for span in ended]
    assert otlp_messages.encode_spans(told) == trace_encoder.encode_spans(told)
    assert otlp_messages.encode_spans([]) == trace_encoder.encode_spans([])


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_who_sends_spans_encodes_them_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporters take it from nobody: it is put in its place, which a new release may move."""
    module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
    monkeypatch.setattr(module, "encode_spans", None)  # that what was there comes back
    monkeypatch.setattr(otlp_module, "PARTING_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc" if kind == "grpc" else "http/protobuf")
    encoded = threading.Event()

    def encode(spans: Any) -> Any:
        encoded.set()
        return otlp_messages.encode_spans(spans)

    monkeypatch.setattr(otlp_module, "encode_spans", encode)
    otlp = Otlp("http://127.0.0.1:1", ME)
    otlp.start("one", None).end()
    assert encoded.wait(SECONDS)
    otlp.close()


def test_a_share_of_traces_is_sampled_whole(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    router, worker = Otlp(receiver.url, ME), Otlp(receiver.url, ME)
    for _ in range(64):
        root = router.start("root", None)
        worker.start("below", root.context).end()
        root.end()
    router.close()
    worker.close()
    names = {one.sent.trace_id: set[str]() for one in receiver.spans}
    for one in receiver.spans:
        names[one.sent.trace_id].add(one.sent.name)
    assert 0 < len(names) < 64 and all(of == {"root", "below"} for of in names.values())


@pytest.mark.parametrize(("sampler", "recorded"), [(None, False), ("always_on", True)])
def test_a_client_that_records_nothing_is_followed_unless_the_sampler_is_told_otherwise(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, sampler: str | None, recorded: bool
) -> None:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    router = Otlp(receiver.url, ME)
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    worker = Otlp(receiver.url, ME)
    span = router.start("one", TraceContext(7, 8, 0))
    worker.start("below", span.context).end()
    span.end()
    router.close()
    worker.close()
    assert {one.sent.name for one in receiver.spans} == ({"one", "below"} if recorded else set())


def test_of_many_events_the_last_are_told(receiver: Receiver) -> None:
    otlp = Otlp(receiver.url, ME)
    span = otlp.start("one", None)
    for number in range(otlp_module.MOST_EVENTS + 1):
        span.event(str(number))
    span.end()
    otlp.close()
    (one,) = receiver.spans
    assert [name for name, _ in one.events][:1] == ["1"] and one.sent.dropped_events_count == 1


def test_of_a_collectors_answer_the_body_is_not_read(receiver: Receiver) -> None:
    """It has no end: whoever reads all of it waits for ever, and holds it."""
    receiver.says = lambda: repeat(bytes(2**16))
    otlp = Otlp(receiver.url, ME)
    for name in ("one", "two"):
        otlp.start(name, None).end()
        eventually(lambda name=name: name in {one.sent.name for one in receiver.spans})
        eventually(lambda: otlp._queue._waiting == 0)  # type: ignore[union-attr]
    assert otlp.dropped == 0
    otlp.close()


def test_a_collector_cannot_send_spans_elsewhere(receiver: Receiver) -> None:
    with Receiver() as other:
        receiver.answer, receiver.head = lambda: 307, {"location": f"{other.url}/v1/traces"}
        otlp = Otlp(receiver.url, ME)
        otlp.start("one", None).end()
        eventually(lambda: otlp.dropped == 1)
        otlp.close()
        assert not other.requests


def test_a_slow_collector_holds_nobody_up(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setattr(otlp_module, "PARTING_SECONDS", 0.05)
    goes_on = threading.Event()

    def slow() -> int:
        goes_on.wait(SECONDS)
        return 200

    receiver.answer = slow
    otlp = Otlp(receiver.url, ME)
    for _ in range(20):
        otlp.start("x", None).end()
    assert otlp.dropped == 12  # with the collector still waiting
    otlp.close()  # comes back
    assert receiver.spans == []
    goes_on.set()
    eventually(lambda: len(receiver.spans) == 8)


def test_what_a_collector_refuses_is_counted_and_told_once(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answer = lambda: 400
    otlp = Otlp(receiver.url, ME)
    with caplog.at_level(logging.WARNING):
        for count in range(1, 4):
            otlp.start("x", None).end()
            eventually(lambda count=count: otlp.dropped == count)
        receiver.answer = lambda: 200
        otlp.start("y", None).end()
        otlp.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "does not take spans" in told[0] and "http/protobuf" in told[0]
    assert told[1] == "the collector takes spans again; 3 were dropped"
    assert [one.sent.name for one in receiver.spans] == ["y"]


def test_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            taken.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    otlp = Otlp(f"http://127.0.0.1:{port}", ME)
    otlp.start("x", None).end()
    otlp.close()
    server.stop(None)
    (request,) = taken
    (spans,) = request.resource_spans
    assert spans.scope_spans[0].spans[0].name == "x"
    assert values(spans.resource.attributes)["service.namespace"] == "outrider"


def test_the_environment_says_where_and_what(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    for exporter, sent in (("none", 0), ("otlp", 1)):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
        otlp = tracer_of(Export(from_environment=True), ME)
        assert otlp is not None
        otlp.start("x", None).end()
        otlp.close()
        assert len(receiver.spans) == sent
    assert receiver.spans[0].resource["service.name"] == "mine"
    assert tracer_of(Export(), ME) is None


def test_variables_that_name_a_collector() -> None:
    traces = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}
    assert named_in(traces) and named_in({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"})
    assert not named_in({}) and not named_in({**traces, "OTEL_SDK_DISABLED": "True"})


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "collector:4317",
            r"--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT, not 'collector:4317'",
        ),
        ("http://me:password@c:1", "--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT$"),
    ],
)
def test_an_endpoint_is_a_url(url: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        Export(url)


def test_without_the_extra_the_option_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"--otlp-endpoint needs .*: pip install 'outrider\[otel\]'"):
        Export("http://127.0.0.1:4318")
    assert tracer_of(Export(from_environment=True), ME) is None  # a platform may set it for all
    assert "install outrider[otel]" in caplog.text and caplog.records[0].name == tracing.__name__


def test_metrics_are_what_prometheus_would_be_told() -> None:
    registry = CollectorRegistry()
    Counter("asked", "Asked.", ["model"], registry=registry).labels("m").inc(3)
    Gauge("running", "Running.", registry=registry).set(2.5)
    took = Histogram("took", "Took.", registry=registry, buckets=(1, 2))
    for value in (0.5, 1.5, 1.7, 9):
        took.observe(value)
    found = {one.name: one for one in converted(registry.collect(), 1, 2)}
    assert found.keys() == {"asked_total", "running", "took"}
    (asked,) = found["asked_total"].data.data_points
    assert (asked.attributes, asked.value, asked.time_unix_nano) == ({"model": "m"}, 3, 2)
    assert asked.start_time_unix_nano > 2  # when the counter was made
    (running,) = found["running"].data.data_points
    assert running.value == 2.5
    (distribution,) = found["took"].data.data_points
    assert (distribution.count, distribution.sum) == (4, 12.7)
    assert (list(distribution.bucket_counts), list(distribution.explicit_bounds)) == ([1, 2, 1], [1, 2])


def test_what_nobody_asked_for_is_not_loaded() -> None:
    program = (
        "import sys, router.service\n"
        "from outrider.store.memory import MemoryStore\n"
        "from outrider.options.telemetry import Export\n"
        "import asyncio\n"
        "async def made():\n"
        "    told = dict(num_speculative_tokens=1, max_sessions=1, export=Export(sys.argv[1] or None))\n"
        "    router.service.Router(MemoryStore(), **told)\n"
        "asyncio.run(made())\n"
        "print(sorted(name for name in sys.modules if name.startswith('outrider.telemetry.otlp')))"
    )
    needed = [f"outrider.telemetry.{name}" for name in ("otlp", "otlp_messages", "otlp_metrics")]
    for url, loaded in (("", "[]"), ("http://127.0.0.1:9", str(needed))):
        run = subprocess.run([sys.executable, "-c", program, url], cwd=ROOT, capture_output=True, text=True)
        assert run.stdout.strip() == loaded, run.stderr
