"""A session's spans at a verifier."""

from __future__ import annotations

from outrider.sampling.params import SamplingParams
from outrider.wire.session import FinishReason, SessionParams
from outrider.wire.trace_context import TraceContext
from tests.telemetry.recorder import Recorder
from verifier.running import Running
from verifier.session import Outcome, Session, SessionSpec
from verifier.session_trace import SessionTrace

PARENT = TraceContext(7, 8, 1)
SPEC = SessionSpec(b"s" * 16, SessionParams((1, 2, 3), SamplingParams(), 9), (4,), 100, b"")


def test_a_span_for_the_queue_for_the_prompt_and_for_the_output() -> None:
    recorder, now = Recorder(), 5.0
    trace = SessionTrace(recorder, PARENT, SPEC, "m", lambda: now)
    trace.begun(cached=2)
    trace.committed(Outcome(4, (10,), 0, 0, None))
    now += 0.5
    trace.committed(Outcome(5, (11, 12), 1, 3, None, beside=2))
    now += 1.5
    trace.preempted()
    trace.committed(Outcome(7, (13,), 0, 1, FinishReason.LENGTH))
    trace.over()
    _, prefill, decode = recorder.spans
    assert [one.name for one in recorder.spans] == ["queue", "prefill", "decode"]
    assert all(one.parent == PARENT and one.ended == [""] for one in recorder.spans)
    assert {one.figures["outrider.session.id"] for one in recorder.spans} == {SPEC.session_id.hex()}
    assert prefill.figures["gen_ai.usage.input_tokens"] == 4
    assert prefill.figures["gen_ai.usage.cache_read.input_tokens"] == 2
    assert decode.events == [
        ("preempted", {"outrider.tokens": 3}),
        ("stall", {"outrider.seconds": 1.5, "outrider.tokens": 3}),
    ]
    told = {name: decode.figures[f"outrider.{name}"] for name in ("steps", "draft_tokens", "accepted_tokens")}
    assert told == {"steps": 3, "draft_tokens": 6, "accepted_tokens": 1}
    assert decode.figures["gen_ai.usage.output_tokens"] == 4
    assert decode.figures["gen_ai.response.finish_reasons"] == ["length"]


def test_another_router_that_has_it_is_an_event() -> None:
    recorder = Recorder()
    running = Running(Session(SPEC, 4), None)
    running.trace = SessionTrace(recorder, PARENT, SPEC, "m", lambda: 0.0)
    running.adopted(SPEC)
    assert recorder.spans[0].events == [("adopted", {"outrider.tokens": 0})]


def test_one_that_never_began_has_a_queue_alone() -> None:
    recorder = Recorder()
    trace = SessionTrace(recorder, PARENT, SPEC, "m", lambda: 0.0)
    trace.over(failed=True)
    (queue,) = recorder.spans
    assert (queue.name, queue.ended) == ("queue", ["error"])
    assert "gen_ai.response.finish_reasons" not in queue.figures
