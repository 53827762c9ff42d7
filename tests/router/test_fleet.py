"""Placement as it comes about: from what was placed here before, and from what workers report."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from outrider.errors import Unavailable
from outrider.sampling.params import SamplingParams
from outrider.v1 import drafter_pb2
from outrider.wire.session import SessionParams
from router.requests import GenerationRequest
from tests.router.asking import first_step

ONE, TWO = tuple(range(10, 30)), tuple(range(50, 70))  # more than a block each


def ask(rig: Any, prompt: tuple[int, ...], fingerprint: str | None = None, cache_salt: bytes = b"") -> Any:
    params = SessionParams(prompt, SamplingParams(seed=1), 20, cache_salt=cache_salt)
    return rig.sessions.run(GenerationRequest("m", params, fingerprint=fingerprint))


@pytest.mark.parametrize(
    ("here", "there"),
    [((ONE, b""), (TWO, b"")), ((ONE, b"alice"), (ONE, b"bob"))],
    ids=["other prompts", "other salts"],
)
async def test_a_prompt_goes_where_its_like_went_before(
    rig: Any, here: tuple[tuple[int, ...], bytes], there: tuple[tuple[int, ...], bytes]
) -> None:
    first, second = await rig.verifier("v1"), await rig.verifier("v2")
    for asked in ((here, there), (there, here)):
        asks = [ask(rig, prompt, cache_salt=salt) for prompt, salt in asked]
        async with aclosing(asks[0]) as one, aclosing(asks[1]) as two:
            asking = asyncio.ensure_future(first_step(one))
            await rig.until(lambda: len(rig.sessions._open) == 1)
            other = asyncio.ensure_future(first_step(two))
            for worker, wanted in ((first, here), (second, there)):
                params = (await worker.next_command("open")).params
                assert (tuple(params.prompt), params.cache_salt) == wanted
            for task in (asking, other):
                task.cancel()
            await asyncio.gather(asking, other, return_exceptions=True)
        for worker in (first, second):
            await worker.next_command("close")


async def test_a_context_is_served_as_long_as_one_verifiers_kv_pool_holds_it(rig: Any) -> None:
    """Else a chat that names no max_tokens would be refused; and one small verifier refuses nobody's."""
    served = []
    workers = []
    for worker_id, kv_blocks in (("v1", 1), ("v2", 2), ("v3", 1)):
        workers.append(await rig.verifier(worker_id, kv_blocks=kv_blocks))
        served += [model.max_context for model in rig.fleet.models()]
    await workers[1].stop()
    await rig.until(lambda: "v2" not in rig.fleet.verifiers)
    assert [*served, *(model.max_context for model in rig.fleet.models())] == [16, 32, 32, 16]


async def test_the_drafter_that_is_nearer_to_the_sessions_verifier_drafts(rig: Any) -> None:
    verifier = await rig.verifier()
    far, near = await rig.drafter("d1"), await rig.drafter("d2")
    for drafter, seconds in ((far, 0.05), (near, 0.001)):
        trips = {verifier.address: seconds, "elsewhere:1": 0.01}
        drafter.say(load=drafter_pb2.DrafterLoad(token_seconds=0.001, round_trips=trips))
        await rig.until(
            lambda name=drafter.worker_id: rig.fleet.drafters[name].load.token_seconds > 0  # type: ignore[misc]
        )
    async with aclosing(ask(rig, ONE)) as session:
        asking = asyncio.ensure_future(first_step(session))
        opened = await near.next_command("open")
        assert opened.verifier_address == verifier.address
        assert far.commands.empty()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_the_drafter_whose_model_this_target_accepts_more_often_drafts(rig: Any) -> None:
    await rig.verifier(fingerprint="target")
    disliked, liked = await rig.drafter("d1", fingerprint="a"), await rig.drafter("d2", fingerprint="b")
    pair = rig.sessions.pair
    for accepted, draft in ((10, "a"), (90, "b")):
        pair("target", draft).absorb(accepted, 100)
        pair("another target", draft).absorb(100 - accepted, 100)
    async with aclosing(ask(rig, ONE)) as session:
        asking = asyncio.ensure_future(first_step(session))
        await liked.next_command("open")
        assert disliked.commands.empty()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def another_checkpoint(rig: Any, former: Any) -> Any:
    """A verifier that serves another model under the name of `former`, which goes."""
    former.registration.cancel()
    await rig.until(lambda: not rig.fleet.verifiers)
    return await rig.verifier("v2", fingerprint="two")


async def test_a_request_is_not_run_by_another_checkpoint_than_it_was_read_for(rig: Any) -> None:
    """Its tokens may mean something else there."""
    first = await rig.verifier("v1", fingerprint="one")
    served = rig.sessions.model("m")
    other = await another_checkpoint(rig, first)
    with pytest.raises(Unavailable, match="another checkpoint of 'm' is served since"):
        await anext(ask(rig, ONE, served.fingerprint))
    async with aclosing(ask(rig, ONE, "two")) as session:
        asking = asyncio.ensure_future(first_step(session))
        await other.next_command("open")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_session_that_lost_its_verifier_does_not_go_on_at_another_checkpoint(rig: Any) -> None:
    first = await rig.verifier("v1", fingerprint="one")
    lost = asyncio.ensure_future(first_step(ask(rig, ONE)))
    await first.next_command("open")
    other = await another_checkpoint(rig, first)
    new = asyncio.ensure_future(first_step(ask(rig, TWO)))
    assert tuple((await other.next_command("open")).params.prompt) == TWO
    assert other.commands.empty() and not lost.done()
    for asking in (lost, new):
        asking.cancel()
    await asyncio.gather(lost, new, return_exceptions=True)
