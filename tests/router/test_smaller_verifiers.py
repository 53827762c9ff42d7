"""Sessions whose verifier is lost, where those that are left cannot hold what the session may become."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import Unavailable
from router import losses
from tests.router.asking import Running, committed, finished, request


async def begun(rig: Any) -> tuple[Any, Running]:
    """A session with one token, of its verifier."""
    verifier = await rig.verifier("large")
    running = Running(rig, request(max_tokens=40))
    verifier.say(**committed((await verifier.next_command("open")).session_id, 3, 10))
    await rig.until(lambda: len(running.events) == 1)
    return verifier, running


async def test_it_waits_for_one_that_holds_it(rig: Any) -> None:
    """It had been sent to the small one, and ended by its refusal as if the client had asked for too much."""
    large, running = await begun(rig)
    small = await rig.verifier("small", kv_blocks=1)
    await large.stop()
    await rig.until(lambda: list(rig.fleet.verifiers) == ["small"])
    another = await rig.verifier("another")
    opened = await another.next_command("open")
    assert list(opened.output) == [10]
    another.say(**committed(opened.session_id, 4, 3), **finished(opened.session_id))
    await running.task
    assert small.commands.empty()


async def test_if_none_comes_it_can_be_resumed(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "RESUME_SECONDS", 0.1)
    large, running = await begun(rig)
    await rig.verifier("small", kv_blocks=1)
    await large.stop()
    with pytest.raises(Unavailable, match="none came in its place"):
        await running.task


async def test_what_one_held_that_was_here_a_moment_ago_is_known(rig: Any) -> None:
    large = await rig.verifier("large")
    await rig.verifier("small", kv_blocks=1)
    held = rig.fleet.verifiers["large"].registration.info.max_context
    assert rig.sessions.model("").absent_context == 0
    await large.stop()
    await rig.until(lambda: list(rig.fleet.verifiers) == ["small"])
    model = rig.sessions.model("")
    assert model.max_context < model.absent_context == held
