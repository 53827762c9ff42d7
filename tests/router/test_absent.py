"""Requests that come while no verifier of their model is here: they wait, as sessions that lost theirs do."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from types import FrameType
from typing import Any

import pytest

from outrider.errors import Overloaded, Unavailable, UnknownModel
from outrider.v1 import verifier_pb2
from outrider.wire.description import TokenizerFiles
from outrider.wire.load import VerifierLoad
from router import absent as absent_module
from router import losses
from router.absent import Absent, come_back
from router.admission import LEAST_QUEUE
from router.placement import VerifierCandidate
from router.requests import ServedModel, SessionEnded
from tests.router.asking import Running, committed, finished, request
from tests.router.conftest import Rig, Worker


async def gone(rig: Rig, *workers: Worker) -> None:
    for worker in workers:
        await worker.stop()
    await rig.until(lambda: not any(worker.worker_id in rig.fleet.verifiers for worker in workers))


async def let_in(rig: Rig, *running: Running) -> None:
    """Waits until they are open; none is refused."""
    await rig.until(lambda: len(rig.sessions.open) >= len(running) or any(one.task.done() for one in running))
    assert not any(one.task.done() for one in running)


async def test_a_request_waits_for_a_verifier_that_was_here_a_moment_ago(rig: Any) -> None:
    await gone(rig, await rig.verifier())
    assert not rig.sessions.ready()
    assert rig.sessions.models() == []
    running = Running(rig, request())
    await let_in(rig, running)
    verifier = await rig.verifier(incarnation=2)
    session_id = (await verifier.next_command("open")).session_id
    verifier.say(**committed(session_id, 3, 10, 0))
    verifier.say(**finished(session_id))
    *_, end = await running.task
    assert isinstance(end, SessionEnded)


async def test_it_waits_while_the_only_one_leaves(rig: Any) -> None:
    """As it would a second later, when that is gone."""
    leaving = await rig.verifier("v")
    leaving.say(load=verifier_pb2.VerifierLoad(draining=True))
    await rig.until(lambda: not rig.sessions.ready())
    running = Running(rig, request())
    await let_in(rig, running)
    await gone(rig, leaving)
    back = await rig.verifier("v", incarnation=2)
    await back.next_command("open")
    running.task.cancel()


async def test_it_does_so_where_another_model_is_served_meanwhile(rig: Any) -> None:
    verifier, _ = await rig.verifier("v"), await rig.verifier("w", model="n", fingerprint="another")
    await gone(rig, verifier)
    assert rig.sessions.model("").name == "n"
    running = Running(rig, request(model="m"))
    await let_in(rig, running)
    back = await rig.verifier("v", incarnation=2)
    await back.next_command("open")
    running.task.cancel()
    with pytest.raises(UnknownModel, match="there is 'm', 'n'"):
        rig.sessions.model("c")


async def test_where_none_has_been_here_for_longer_than_a_session_waits_it_is_refused_at_once(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1.0
    monkeypatch.setattr(rig.fleet, "_clock", lambda: now)
    await gone(rig, await rig.verifier())
    now += losses.RESUME_SECONDS - 0.1
    assert rig.sessions.model("m").fingerprint == "VERIFIER model"
    now += 0.1
    with pytest.raises(Unavailable, match="no target worker is registered"):
        rig.sessions.model("m")
    with pytest.raises(Unavailable, match="no target worker is registered"):
        await Running(rig, request()).task


async def test_it_waits_no_longer_than_a_session_that_lost_its_verifier(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gone(rig, await rig.verifier())
    monkeypatch.setattr(losses, "RESUME_SECONDS", 0.05)
    with pytest.raises(Unavailable, match="no target worker came within"):
        await Running(rig, request()).task


async def test_nor_longer_than_its_client(rig: Any) -> None:
    await gone(rig, await rig.verifier())
    with pytest.raises(Unavailable, match="in the time that the client waits"):
        await Running(rig, request(deadline=asyncio.get_running_loop().time() + 0.05)).task


async def test_no_more_wait_than_would_at_the_verifier_itself(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.sessions._places, "_most", 1000)
    verifiers = [
        await rig.verifier("v", kv_blocks=8),
        await rig.verifier("w", kv_blocks=8),
    ]  # of 128 tokens each
    lost = [Running(rig, request()) for _ in verifiers]
    for verifier in verifiers:
        await verifier.next_command("open")
    await gone(rig, *verifiers)
    prompt = (5,) * 60  # two of them find room in a pool
    most = 2 * (2 + LEAST_QUEUE) - len(lost)
    waiting = [Running(rig, request(prompt=prompt)) for _ in range(most)]
    await let_in(rig, *lost, *waiting)
    assert len(rig.sessions.open) == len(lost) + most
    with pytest.raises(Overloaded, match="full queue"):
        await Running(rig, request(prompt=prompt)).task
    assert not any(one.task.done() for one in [*lost, *waiting])
    waiting.pop().task.cancel()
    await rig.until(lambda: len(rig.sessions.open) == len(lost) + most - 1)
    waiting.append(Running(rig, request(prompt=prompt)))
    await let_in(rig, *lost, *waiting)
    for one in [*lost, *waiting]:
        one.task.cancel()


def model(fingerprint: str = "f", max_context: int = 16, numerics: tuple[str, ...] = ()) -> ServedModel:
    return ServedModel(
        "m", fingerprint, 100, max_context, frozenset(), TokenizerFiles("t", "", "", {}), 0, (), numerics
    )


def verifier(worker_id: str, **load: Any) -> VerifierCandidate:
    return VerifierCandidate(worker_id, "m", dataclasses.replace(VerifierLoad(), **load), 3, 1000)


def test_what_was_served_is_what_all_that_served_it_could() -> None:
    absent = Absent()
    absent.went(verifier("a"), model(max_context=32, numerics=("x",)), 0.0)
    absent.went(verifier("b"), model(max_context=16, numerics=("y",)), 1.0)
    (served,) = absent.models(2.0)
    assert (served.max_context, served.numerics) == (32, ("x", "y"))
    (served,) = absent.models(losses.RESUME_SECONDS)  # the first has been gone for too long
    assert (served.max_context, served.numerics) == (16, ("y",))


def test_who_has_come_back_or_served_other_weights_is_not_awaited() -> None:
    absent = Absent()
    for worker_id in "abc":
        absent.went(verifier(worker_id), model("g" if worker_id == "c" else "f"), 0.0)
    absent.came("a")
    absent.replaced("m", "g")
    assert [one.worker_id for one in absent.of("m", 0.0)] == ["c"]
    absent.replaced("n", "f")
    assert [one.worker_id for one in absent.of("m", 0.0)] == ["c"]


def test_one_that_goes_again_is_known_from_then_on() -> None:
    absent = Absent()
    for worker_id, now in (("a", 0.0), ("b", 1.0), ("a", 2.0)):
        absent.went(verifier(worker_id), model(), now)
    later = losses.RESUME_SECONDS + 1.0
    assert [one.worker_id for one in absent.of("m", later)] == ["a"]


def test_they_come_back_empty_and_share_out_who_waits() -> None:
    busy = [verifier(name, running=9, waiting=2, kv_usage=1.0, unread_prompt_tokens=7) for name in "ab"]
    back = come_back(busy, 5)
    assert [(one.placed, one.unreported, one.load) for one in back] == [(2, 2, VerifierLoad())] * 2
    assert come_back([], 5) == []


def test_the_tokenizers_of_those_that_come_and_go_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten models with one of 60 MB each, which came anew every 3 seconds, made a router 2 GB larger in 24."""
    monkeypatch.setattr(absent_module, "MOST_TOKENIZERS", 1000)
    absent = Absent()
    for number in range(50):
        files = TokenizerFiles(f"hash {number // 2}", "j" * 300, "", {})
        absent.went(verifier(f"v{number}"), dataclasses.replace(model(), tokenizer=files), 0.0)
        there = [one.verifier.worker_id for one in absent._gone.values()]
        assert there == [f"v{each}" for each in range(max(0, number // 2 * 2 - 4), number + 1)]
    large = TokenizerFiles("large", "j" * 3000, "", {})
    absent.went(verifier("large"), dataclasses.replace(model(), tokenizer=large), 0.0)
    assert list(absent._gone) == ["large"]


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "is given up"])
async def test_the_tokenizer_of_one_that_is_gone_takes_no_memory(rig: Any, leaves: bool) -> None:
    """Verifiers that came and went with a large one had an idle router grow by gigabytes: it is in a cycle
    with an error, and the garbage collector came by much later."""
    behind = await rig.verifier("v")
    held = rig.fleet.verifiers["v"]
    assert held.registration.tokenizer is not None
    gc.disable()
    try:
        if leaves:
            await behind.stop()
        else:
            held.give_up("it is given up")
        await rig.until(lambda: rig.fleet.verifiers.get("v") is not held)
        await rig.until(lambda: held.registration.tokenizer is None)
        frames = [each.f_locals.values() for each in gc.get_objects() if isinstance(each, FrameType)]
        assert not any(isinstance(one, TokenizerFiles) for values in frames for one in values)
    finally:
        gc.enable()
