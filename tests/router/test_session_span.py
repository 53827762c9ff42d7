"""What a session's span tells, and how its trace comes to the workers."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.telemetry.spans import set_current_trace
from outrider.wire.trace_context import TraceContext
from router import session_span
from tests.router.asking import Running, committed, finished, request
from tests.telemetry.recorder import Recorder

CLIENT = TraceContext(7, 8, 1, "a=1")


@pytest.fixture
def recorder(rig: Any) -> Recorder:
    rig.sessions._tracer = Recorder()
    set_current_trace(CLIENT)
    recorder: Recorder = rig.sessions._tracer
    return recorder


async def test_moves_and_drafters_are_events_and_workers_get_the_trace(rig: Any, recorder: Recorder) -> None:
    first, drafter = await rig.verifier("v"), await rig.drafter()
    running = Running(rig, request())
    opened, drafted = await first.next_command("open"), await drafter.next_command("open")
    (span,) = recorder.spans
    assert (span.name, span.parent) == ("session", CLIENT)
    assert TraceContext.of(opened) == TraceContext.of(drafted) == span.context
    first.say(**committed(opened.session_id, 3, 10))
    first.say(**committed(opened.session_id, 4, 11, 12, accepted=1, verified=2))
    await rig.until(lambda: len(running.events) == 2)
    second = await rig.verifier("w")
    await first.stop()
    again = await second.next_command("open")
    assert TraceContext.of(again) == span.context and list(again.output) == [10, 11, 12]
    second.say(**committed(again.session_id, 6, 3), **finished(again.session_id))
    await running.task
    told = [
        (name, about.get("outrider.verifier"), about.get("outrider.tokens")) for name, about in span.events
    ]
    assert [one for one in told if one[0] != "drafter taken"] == [
        ("placed", "v", 0),
        ("first token", None, None),
        ("lost", "v", 3),
        ("placed", "w", 3),
    ]
    assert ("drafter taken", None, None) in told
    assert span.ended == [""]
    assert span.figures["gen_ai.usage.output_tokens"] == 4
    assert span.figures["gen_ai.response.finish_reasons"] == ["stop"]
    assert (span.figures["outrider.moves"], span.figures["outrider.stalls"]) == (1, 0)


async def test_a_long_pause_between_two_steps_is_a_stall(
    rig: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_span, "STALL_SECONDS", -1.0)
    verifier = await rig.verifier()
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    for at in range(3):
        verifier.say(**committed(opened.session_id, 3 + at, 10))
    await rig.until(lambda: len(running.events) == 3)
    (span,) = recorder.spans
    stalls = [about for name, about in span.events if name == "stall"]
    assert [about["outrider.tokens"] for about in stalls] == [1, 2]
    running.task.cancel()
    await rig.until(lambda: bool(span.ended))
    assert span.ended == [""] and "gen_ai.response.finish_reasons" not in span.figures


async def test_an_error_is_the_spans(rig: Any, recorder: Recorder) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request())
    await verifier.next_command("open")
    rig.sessions.stop()
    with pytest.raises(Exception, match="the service is stopping"):
        await running.task
    assert recorder.spans[0].ended == ["unavailable_error"]


async def test_without_a_tracer_the_clients_own_trace_is_handed_on(rig: Any) -> None:
    verifier = await rig.verifier()
    set_current_trace(CLIENT)
    running = Running(rig, request())
    assert TraceContext.of(await verifier.next_command("open")) == CLIENT
    running.task.cancel()
    set_current_trace(None)
    running = Running(rig, request())
    await verifier.next_command("close")
    opened = await verifier.next_command("open")
    assert (opened.traceparent, opened.tracestate) == ("", "")
    running.task.cancel()
