"""A session that loses its verifier goes on at another with the same tokens."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import Cancelled, Unavailable
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from router import losses
from router.losses import MAX_LOSSES
from router.requests import GenerationRequest, TokensCommitted
from tests.in_process import Cluster, Worker
from tests.tiny_models import build
from verifier.stepper import Stepper

VARIANTS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.1, seed=6),
)
PROMPTS = ([5, 6, 7, 8], [11] * 20, list(range(30, 70)))
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("moving") / "target")


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    async def undisturbed() -> list[list[int]]:
        async with Cluster(target) as cluster:
            return [answer.tokens for answer in await ask_all(cluster)]

    return asyncio.run(undisturbed())


async def ask_all(cluster: Cluster, on_tokens: Any = None) -> list[Any]:
    return await asyncio.gather(
        *(
            cluster.ask(prompt, variant, MAX_TOKENS, on_tokens=on_tokens)
            for prompt, variant in zip(PROMPTS, VARIANTS, strict=True)
        )
    )


class Once:
    """Runs `action` when an answer has come half way, once."""

    def __init__(self, action: Any) -> None:
        self._action = action
        self.done = False

    async def __call__(self, tokens: list[int]) -> None:
        if len(tokens) >= MAX_TOKENS // 2 and not self.done:
            self.done = True
            await self._action()


async def test_a_killed_verifiers_sessions_go_on_at_another(target: Path, expected: list[list[int]]) -> None:
    async with Cluster(target) as cluster:
        other = await cluster.add_verifier()
        await cluster.add_drafter(target)
        kill = Once(cluster.verifier.kill)
        answers = await ask_all(cluster, kill)
        assert kill.done and other.stepper.load.running == 0
    assert [answer.tokens for answer in answers] == expected


async def test_the_drafter_follows_a_session_that_moves(target: Path) -> None:
    async with Cluster(target) as cluster:
        await cluster.add_drafter(target)
        kill = Once(cluster.verifier.kill)
        request = GenerationRequest("", SessionParams(tuple(PROMPTS[0]), VARIANTS[0], 800))
        tokens, accepted_after = 0, 0
        async for event in cluster.sessions.run(request):
            if isinstance(event, TokensCommitted):
                tokens += len(event.tokens)
                accepted_after += event.accepted * kill.done
                if tokens >= 60 and not kill.done:
                    await cluster.add_verifier()
                    await kill([0] * MAX_TOKENS)
    assert tokens == 800
    assert accepted_after > 100


async def test_a_session_may_move_often_while_it_gains_tokens(
    target: Path, expected: list[list[int]]
) -> None:
    """Back to the same verifier each time, which has its prefix still; what counts is the first visit."""
    async with Cluster(target) as cluster:
        await cluster.add_drafter(target)
        moves: list[int] = []

        async def send_away(tokens: list[int]) -> None:
            if len(tokens) >= 15 * (len(moves) + 1):
                moves.append(len(tokens))
                cluster.verifier.service.give_back()

        answer = await cluster.ask(PROMPTS[2], VARIANTS[2], MAX_TOKENS, on_tokens=send_away)
    assert len(moves) > MAX_LOSSES
    assert answer.tokens == expected[2]
    assert answer.cached_prompt_tokens == 0


async def test_where_there_is_no_other_they_wait_for_one(target: Path, expected: list[list[int]]) -> None:
    async with Cluster(target) as cluster:
        newcomers: list[Worker] = []

        async def replace() -> None:
            await cluster.verifier.kill()
            newcomers.append(await cluster.add_verifier())

        answers = await ask_all(cluster, Once(replace))
    assert newcomers
    assert [answer.tokens for answer in answers] == expected


async def test_a_verifier_that_drains_hands_over_what_it_still_has(
    target: Path, expected: list[list[int]]
) -> None:
    async with Cluster(target) as cluster:
        draining = cluster.verifier
        await cluster.add_verifier()
        await cluster.add_drafter(target)

        async def leave() -> None:
            draining.service.drain()
            draining.service.give_back()

        leaving = Once(leave)
        answers = await ask_all(cluster, leaving)
        assert leaving.done and not draining.service.load().sessions
        after = await cluster.ask(PROMPTS[0], VARIANTS[0], MAX_TOKENS)
        assert draining.service.load().draining
    assert [answer.tokens for answer in answers] == expected
    assert after.tokens == expected[0]


async def test_the_drafter_is_still_the_sessions_own_after_a_hand_over(target: Path) -> None:
    """It hears of the move from two sides, in any order."""
    async with Cluster(target) as cluster:
        await cluster.add_drafter(target)
        draining = cluster.verifier
        other = await cluster.add_verifier()
        held: list[int] = []

        async def on_tokens(tokens: list[int]) -> None:
            if len(tokens) >= 60 and not held:
                for verifier in (draining, other):
                    if verifier.service.load().sessions:
                        verifier.service.drain()
                        verifier.service.give_back()
            sessions = cluster.sessions._open.values()
            if len(tokens) >= 60 and not any(session.unplaced for session in sessions):  # not on its way
                held.extend(drafter.placed for drafter in cluster.fleet.drafters.values())

        await cluster.ask(PROMPTS[0], VARIANTS[0], 400, on_tokens=on_tokens)
    assert len(held) > 20 and set(held[:20]) == {1}


async def test_where_none_comes_the_client_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "RESUME_SECONDS", 0.2)
    async with Cluster(target) as cluster:
        with pytest.raises(Unavailable, match="none came in its place"):
            await cluster.ask(PROMPTS[0], VARIANTS[0], MAX_TOKENS, on_tokens=Once(cluster.verifier.kill))


async def test_a_request_that_every_verifier_gives_back_ends(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.losses.APART_SECONDS", 0.0)
    async with Cluster(target) as cluster:
        cluster.verifier.stepper.drain()  # without a word to the router
        with pytest.raises(Unavailable, match="4 target workers in a row"):
            await cluster.ask(PROMPTS[0], VARIANTS[0], MAX_TOKENS)


async def test_a_session_can_be_cancelled_by_its_id(target: Path) -> None:
    async with Cluster(target) as cluster:

        async def cancel() -> None:
            (session_id,) = cluster.sessions._open
            await cluster.sessions.cancel(session_id)

        with pytest.raises(Cancelled):
            await cluster.ask(PROMPTS[0], VARIANTS[0], MAX_TOKENS, on_tokens=Once(cancel))
        await cluster.sessions.cancel(b"x" * 16)  # nobody's


async def test_those_that_wait_at_a_full_verifier_move_to_one_that_joins_and_none_that_has_begun(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first verifier's pool is full with one prompt, and its step does not end before the others have."""
    prompts = list(range(20, 170)), [7] * 40, list(range(30, 70))

    def answers(cluster: Cluster) -> list[asyncio.Task[Any]]:
        return [
            asyncio.create_task(cluster.ask(prompt, variant, 40))
            for prompt, variant in zip(prompts, VARIANTS, strict=True)
        ]

    async with Cluster(target) as cluster:
        expected = [answer.tokens for answer in await asyncio.gather(*answers(cluster))]
    go_on = threading.Event()
    monkeypatch.setattr("outrider.worker.stepwatch.UNKNOWN_SECONDS", 1000.0)  # the step is not given up
    try:
        async with Cluster(target, kv_blocks=12) as cluster:
            await cluster.add_drafter(target)
            first = cluster.verifier.stepper
            hold(first, go_on)
            asked = answers(cluster)
            while first.load.waiting < 2 or not first.load.running:  # noqa: ASYNC110 (plain state)
                await asyncio.sleep(0.01)
            second = await cluster.add_verifier()
            async with asyncio.timeout(120):
                moved = await asyncio.gather(*asked[1:])
            assert first.load.running == 1 and not asked[0].done()
            go_on.set()
            tokens = [answer.tokens for answer in [await asked[0], *moved]]
            assert not second.stepper.load.running and not first.load.preemptions
    finally:
        go_on.set()
    assert tokens == expected


def hold(stepper: Stepper, go_on: threading.Event) -> None:
    """Its steps do not end before `go_on`."""
    engine = stepper._engine
    choose = engine.choose

    def choose_then(*work: Any) -> list[int]:
        go_on.wait()
        return choose(*work)

    engine.choose = choose_then  # type: ignore[method-assign]
