"""One trace for a request through router, verifier and drafter, sent by real processes to a collector."""

from __future__ import annotations

import json
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import httpx
import pytest

from demo import pair
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.cluster.process import Process
from tests.plain_http import HTTP
from tests.telemetry.receiver import Receiver, Span

SECONDS = 120.0  # only a hang can reach it
PARENT = "00f067aa0ba902b7"
ASKED = {"prompt": "a secret prompt", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def eventually(holds: Callable[[], object], what: str) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def service(receiver: Receiver) -> Iterator[Process]:
    """`outrider serve` with everything on."""
    command = [
        *(sys.executable, "-m", "outrider_cli", "serve", "--target", pair.NAME, "--port", "0"),
        *("--grpc-port", "0", "--kv-memory", "64MiB", "--log-level", "info", "--log-format", "json"),
        *("--otlp-endpoint", receiver.url, "--no-compare"),
    ]
    environment = {
        "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "5",  # seconds, for a machine that is busy
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    running = Process(command, environment)
    try:
        running.wait_for("Outrider is ready")
        yield running
        running.signal(signal.SIGTERM)
        running.wait()
    finally:
        running.kill()


@pytest.fixture(scope="module")
def addresses(service: Process) -> tuple[str, str]:
    """Where HTTP and gRPC are."""
    found = re.search(r"ready: (http://\S+)  \(.*gRPC ([\d.:]+)\)", service.wait_for("Outrider is ready"))
    assert found is not None
    return found[1], found[2]


def asked(url: str, trace_id: str, **more: object) -> httpx.Response:
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "x-request-id": f"of-{trace_id}"}
    answer = httpx.post(f"{url}/v1/completions", json={**ASKED, **more}, headers=headers, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer


def trace(receiver: Receiver, trace_id: str, names: set[str]) -> dict[str, Span]:
    """Returns the spans by name once all of them are there."""
    eventually(lambda: {one.sent.name for one in receiver.of_trace(trace_id)} >= names, f"{names} came")
    spans = receiver.of_trace(trace_id)
    once = [one.sent.name for one in spans if one.sent.name != "draft"]  # a drafter may leave and come again
    assert len(set(once)) == len(once), "one of each"
    return {one.sent.name: one for one in spans}


def test_a_request_is_one_trace_through_all_processes(
    receiver: Receiver, service: Process, addresses: tuple[str, str]
) -> None:
    trace_id = secrets.token_hex(16)
    answer = asked(addresses[0], trace_id).json()
    root_name = f"text_completion {pair.NAME}"
    names = {root_name, "session", "queue", "prefill", "decode", "draft"}
    spans = trace(receiver, trace_id, names)
    assert spans.keys() == names
    roles = {name: one.role for name, one in spans.items()}
    assert roles == {
        root_name: "router",
        "session": "router",
        **dict.fromkeys(("queue", "prefill", "decode"), "verifier"),
        "draft": "drafter",
    }
    root, session = spans[root_name], spans["session"]
    assert root.sent.parent_span_id.hex() == PARENT
    assert session.sent.parent_span_id == root.sent.span_id
    for name in ("queue", "prefill", "decode", "draft"):
        assert spans[name].sent.parent_span_id == session.sent.span_id, name
    assert len({one.resource["service.instance.id"] for one in spans.values()}) == 3
    assert root.resource["deployment.environment.name"] == "test"
    usage, figures = answer["usage"], answer["metrics"]["speculative_decoding"]
    told = root.figures
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == pair.NAME
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 40
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["http.response.status_code"] == 200 and told["outrider.request.id"] == f"of-{trace_id}"
    decode = spans["decode"].figures
    assert decode["gen_ai.usage.output_tokens"] == 40
    assert decode["outrider.draft_tokens"] == told["outrider.draft_tokens"] == figures["num_draft_tokens"]
    ends = [spans[name].sent for name in ("queue", "prefill", "decode")]
    assert all(one.start_time_unix_nano <= one.end_time_unix_nano for one in ends)
    assert ends[0].end_time_unix_nano <= ends[1].start_time_unix_nano < ends[2].end_time_unix_nano
    assert session.events[0][0] == "placed"
    assert {"first token", "drafter taken"} <= {name for name, _ in session.events}
    assert "secret" not in str(receiver.spans)
    line = json.loads(service.wait_for(f"of-{trace_id}"))
    assert (line["process"], line["message"], line["trace_id"]) == ("router", "request", trace_id)
    assert (line["output_tokens"], line["finish"]) == (40, "length")


def test_a_call_carries_its_trace_in_its_metadata(receiver: Receiver, addresses: tuple[str, str]) -> None:
    trace_id = secrets.token_hex(16)
    request = generation_pb2.GenerateRequest(text="a secret", max_tokens=8, n=2, seed=1)
    with grpc.insecure_channel(addresses[1]) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(
            request, metadata=[("traceparent", f"00-{trace_id}-{PARENT}-01")], timeout=SECONDS
        )
        assert len([one for one in call if one.HasField("completed")]) == 2

    def named(name: str) -> list[Span]:
        return [one for one in receiver.of_trace(trace_id) if one.sent.name == name]

    eventually(lambda: len(named("decode")) == len(named("session")) == 2, "both sessions came")
    eventually(lambda: named(f"text_completion {pair.NAME}"), "the call came")
    spans = receiver.of_trace(trace_id)
    (root,) = [one for one in spans if one.sent.parent_span_id.hex() == PARENT]
    sessions = [one for one in spans if one.sent.name == "session"]
    assert {one.sent.parent_span_id for one in sessions} == {root.sent.span_id}
    decoding = {one.sent.parent_span_id for one in spans if one.sent.name == "decode"}
    assert decoding == {one.sent.span_id for one in sessions}
    assert root.figures["rpc.response.status_code"] == "OK"
    assert root.figures["gen_ai.request.choice.count"] == 2


def test_who_does_not_want_to_be_recorded_is_not(receiver: Receiver, addresses: tuple[str, str]) -> None:
    unrecorded = list[str]()

    def drafted() -> bool:
        """A drafter that has not paid before gets a session now and then only."""
        unrecorded.append(secrets.token_hex(16))
        headers = {"traceparent": f"00-{unrecorded[-1]}-{PARENT}-00"}
        httpx.post(f"{addresses[0]}/v1/completions", json=ASKED, headers=headers, timeout=SECONDS)
        recorded = secrets.token_hex(16)
        asked(addresses[0], recorded)
        session = trace(receiver, recorded, {"decode", "session"})["session"]
        if "drafter taken" not in {name for name, _ in session.events}:
            return False
        trace(receiver, recorded, {"draft"})
        return True

    eventually(drafted, "somebody drafted")
    assert [receiver.of_trace(each) for each in unrecorded] == [[]] * len(unrecorded)


def test_the_metrics_are_those_of_prometheus(receiver: Receiver, addresses: tuple[str, str]) -> None:
    asked(addresses[0], secrets.token_hex(16))
    eventually(lambda: "vllm:generation_tokens_total" in receiver.metrics, "the metrics came")
    exposed = HTTP.get(f"{addresses[0]}/metrics").text
    names = {line.split()[2] for line in exposed.splitlines() if line.startswith("# TYPE")}

    def tokens() -> float:
        (point,) = receiver.metrics["vllm:generation_tokens_total"].sum.data_points
        return float(point.as_double or point.as_int)

    counted = float(re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", exposed, re.MULTILINE)[0])
    eventually(lambda: tokens() >= counted, f"{counted} tokens are told")
    with_values = {one.removesuffix("_total") for one in receiver.metrics}
    assert with_values <= {name.removesuffix("_total") for name in names}
    (latency,) = receiver.metrics["vllm:e2e_request_latency_seconds"].histogram.data_points
    assert sum(latency.bucket_counts) == latency.count > 0
    assert len(latency.bucket_counts) == len(latency.explicit_bounds) + 1


def test_without_the_collector_answers_come_as_before(
    receiver: Receiver, service: Process, addresses: tuple[str, str]
) -> None:
    trace_id = secrets.token_hex(16)
    before = asked(addresses[0], trace_id, seed=3, temperature=1).json()["choices"][0]["text"]
    receiver.close()
    for _ in range(3):
        after = asked(addresses[0], secrets.token_hex(16), seed=3, temperature=1)
        assert after.json()["choices"][0]["text"] == before
    service.wait_for("the collector does not take spans")

    def dropped() -> float:
        exposed = HTTP.get(f"{addresses[0]}/metrics").text
        return float(re.findall(r"^outrider_spans_dropped_total (\S+)$", exposed, re.MULTILINE)[0])

    eventually(lambda: dropped() >= 2, "what the router could not send is counted")
    assert not any("Traceback" in line or "opentelemetry" in line for line in service.said)
