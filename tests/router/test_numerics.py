"""Sessions whose verifier is lost, among verifiers that round in different ways."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from outrider.errors import DeadlineExceeded, Superseded, Unavailable
from router import losses
from router.numerics import missing, news
from router.requests import SessionBegun, SessionEnded, TokensCommitted
from tests.router.asking import Running, committed, finished, request


def changes(rig: Any) -> float:
    found = rig.metrics.registry.get_sample_value("outrider_numerics_changes_total", {"model_name": "m"})
    return found or 0.0


def test_what_there_is_to_tell() -> None:
    assert [news("", "a"), news("a", "a"), news("a", "b"), news("a", ""), news("", "")] == [
        "a",
        "",
        "b",
        "",
        "",
    ]
    assert missing("", True) == missing("a", False) == ""
    assert "numerics a, and --same-numerics" in missing("a", True)


async def begun(rig: Any, numerics: str = "float32-1", **asked: Any) -> tuple[Any, Running, bytes]:
    """A session with one token of a verifier of those numerics."""
    verifier = await rig.verifier("first", numerics=numerics)
    running = Running(rig, request(**asked))
    session_id = (await verifier.next_command("open")).session_id
    verifier.say(**committed(session_id, 3, 10))
    await rig.until(lambda: len(running.events) == 1)
    return verifier, running, session_id


async def ended(verifier: Any, running: Running) -> list[Any]:
    """Takes the session in at a verifier, gives two steps there and ends it."""
    opened = await verifier.next_command("open")
    assert list(opened.output) == [10]
    verifier.say(**committed(opened.session_id, 4, 11))
    verifier.say(**committed(opened.session_id, 5, 3), **finished(opened.session_id))
    found: list[Any] = await running.task
    return found


async def test_it_goes_on_with_its_own_while_one_is_left(rig: Any) -> None:
    first, running, _ = await begun(rig)
    await rig.verifier("a", numerics="bfloat16-2")
    alike = await rig.verifier("z", numerics="float32-1")
    await first.stop()
    *steps, _end = await ended(alike, running)
    assert [step.numerics for step in steps] == ["float32-1", "", ""]
    assert changes(rig) == 0
    assert rig.sessions.models()[0].numerics == ("bfloat16-2", "float32-1")


async def test_otherwise_it_goes_on_with_others_and_that_is_told(
    rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, running, session_id = await begun(rig)
    with caplog.at_level(logging.WARNING):
        other = await rig.verifier("other", numerics="bfloat16-2")
        assert "the verifiers of 'm' do not compute alike (bfloat16-2, float32-1)" in caplog.text
        await first.stop()
        *steps, _end = await ended(other, running)
    assert [step.numerics for step in steps] == ["float32-1", "bfloat16-2", ""]
    assert changes(rig) == 1
    assert f"session {session_id.hex()}: after 1 tokens with the numerics float32-1 it goes on" in caplog.text


async def test_another_router_knows_from_the_log(rig: Any) -> None:
    first, running, session_id = await begun(rig)
    await rig.verifier("a", numerics="bfloat16-2")
    alike = await rig.verifier("z", numerics="float32-1")
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)
    await first.stop()
    await rig.until(lambda: "first" not in rig.fleet.verifiers)
    events = rig.sessions.resume(session_id)
    begins = await anext(events)
    assert isinstance(begins, SessionBegun)
    assert list(begins.known) == [TokensCommitted((10,), 0, 0, numerics="float32-1")]
    following = asyncio.create_task(anext(events))
    opened = await alike.next_command("open")
    alike.say(**committed(opened.session_id, 4, 3), **finished(opened.session_id))
    assert await following == TokensCommitted((3,), 0, 0)
    assert isinstance(await anext(events), SessionEnded)


async def test_if_asked_to_it_waits_for_its_own(rig: Any) -> None:
    rig.sessions._same_numerics = True
    first, running, _ = await begun(rig)
    other = await rig.verifier("other", numerics="bfloat16-2")
    await first.stop()
    await rig.until(lambda: "first" not in rig.fleet.verifiers)
    alike = await rig.verifier("alike", numerics="float32-1")
    *steps, _end = await ended(alike, running)
    assert [step.numerics for step in steps] == ["float32-1", "", ""]
    assert other.commands.empty() and changes(rig) == 0


@pytest.mark.parametrize("deadline", [None, 1000.0])
async def test_its_wait_ends_with_the_client_s_or_with_a_minute(
    rig: Any, monkeypatch: pytest.MonkeyPatch, deadline: float | None
) -> None:
    monkeypatch.setattr(losses, "RESUME_SECONDS", 0.05)
    rig.sessions._same_numerics = True
    loop = asyncio.get_running_loop()
    until = None if deadline is None else loop.time() + deadline
    first, running, session_id = await begun(rig, deadline=until)
    await rig.verifier("other", numerics="bfloat16-2")
    await first.stop()
    if deadline is not None:
        await rig.until(lambda: "first" not in rig.fleet.verifiers)
        await asyncio.sleep(2 * losses.RESUME_SECONDS)
        assert not running.task.done(), "its client waits longer than a minute"
        rig.sessions._open[session_id].expire_at(loop.time())
    with pytest.raises(Unavailable if deadline is None else DeadlineExceeded) as error:
        await running.task
    assert "its text began with the numerics float32-1, and --same-numerics" in str(error.value.message)


async def test_who_resumes_one_that_waits_as_long_as_its_former_client_waits_a_minute(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "RESUME_SECONDS", 0.01)
    monkeypatch.setattr(rig.sessions, "_same_numerics", True)
    first, running, session_id = await begun(rig, deadline=asyncio.get_running_loop().time() + 100)
    await rig.verifier("other", numerics="bfloat16-2")
    await first.stop()
    with pytest.raises(Unavailable, match="--same-numerics"):
        async with asyncio.timeout(120):
            async for _event in rig.sessions.resume(session_id):
                await rig.until(lambda: "first" not in rig.fleet.verifiers)
    with pytest.raises(Superseded):
        await running.task
