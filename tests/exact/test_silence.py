"""A drafter that says nothing any more, or hangs: the text is the same, and another one drafts on."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from drafter.service import DrafterService
from outrider.net.rpc import new_server
from outrider.sampling.params import SamplingParams
from outrider.wire.drafter_sessions import DrafterEvents, OpenDraft
from outrider.wire.hello import Role
from outrider.wire.session import SessionParams
from router.requests import GenerationRequest, TokensCommitted
from tests.forked import parent
from tests.in_process import Cluster, Worker, load
from tests.tiny_models import build

OUTPUT = 600
STEP_SECONDS = 0.01
SILENT_STEP_SECONDS = 0.05


class SilentDrafter(DrafterService):
    """Answers the hello, takes what it is given, and says nothing."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.given = asyncio.Event()

    async def sessions(self, messages: Any, context: Any) -> Any:
        async for message in messages:
            if message.hello is not None:
                yield DrafterEvents(hello=self._info.identity.hello())
            elif isinstance(message.command, OpenDraft):
                self.given.set()


async def test_a_silent_drafter_is_replaced_and_acceptance_is_back(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target")
    greedy = SamplingParams(temperature=0.0)
    async with Cluster(target) as cluster:
        expected = await cluster.ask([5, 6, 7], greedy, OUTPUT)
        _, tokenizer, info = load(Role.DRAFTER, target)
        silent = SilentDrafter(info, tokenizer)
        server = new_server()
        silent.add_to(server)
        await cluster._join(Worker(server), info)
        tokens: list[int] = []
        steps: list[TokensCommitted] = []  # from the first accepted draft on
        slowly(cluster, steps)
        request = GenerationRequest("", SessionParams((5, 6, 7), greedy, OUTPUT))
        async for event in cluster.sessions.run(request):
            if isinstance(event, TokensCommitted):
                if not tokens:
                    await silent.given.wait()
                    await cluster.add_drafter(target)
                tokens += event.tokens
                if steps or event.accepted:
                    steps.append(event)
    assert tokens == expected.tokens
    # Draft and target are one model: nearly all that is verified is accepted, and in nearly every step. How
    # many drafts have come when a step starts is the machine's affair: `patient` waits for the first.
    assert sum(len(step.tokens) for step in steps) > OUTPUT / 4
    assert sum(step.accepted for step in steps) > 0.9 * sum(step.verified for step in steps)
    assert sum(step.accepted > 0 for step in steps) > 0.9 * len(steps)


HANGING = """
import sys
import threading
from drafter import stepper
from outrider.worker import stepwatch
from outrider_cli import main
from outrider.engine.engine import Engine

THREAD = sys.argv.pop()
rank, calls = Engine.rank, []

def hang(*work):
    calls.append(work)
    if len(calls) > 100 and threading.current_thread().name.startswith(THREAD):
        threading.Event().wait()
    return rank(*work)

Engine.rank = hang
stepper.SHORT_SECONDS = 0.0 if THREAD == "engine" else 1000.0  # below it a step is the event loop's own
stepwatch.UNKNOWN_SECONDS = 1.0
main()
"""
SENTENCES = {
    "engine": "a step of the draft model does not end; this process can only be replaced",
    "MainThread": "its event loop stands still; this process can only be replaced",
}


@pytest.mark.parametrize("thread", list(SENTENCES))
async def test_a_drafter_whose_step_hangs_ends_with_a_sentence_and_its_session_goes_on_plainly(
    tmp_path: Path, thread: str
) -> None:
    target = build("llama", tmp_path / "target")
    greedy = SamplingParams(temperature=0.0)
    async with Cluster(target) as cluster:
        expected = await cluster.ask([5, 6, 7], greedy, 200)
        options = ["drafter", "--draft", str(target), "--router", cluster.router_address, "--threads", "1"]
        options += ["--kv-memory", "16MiB"]
        drafter = parent().fork(("-c", HANGING, *options, thread), os.environ, errors=True)
        try:
            while not cluster.fleet.drafters:  # noqa: ASYNC110 (plain state)
                await asyncio.sleep(0.02)
            ending, accepted = asyncio.create_task(asyncio.to_thread(drafter.stdout.read)), 0
            while not ending.done():  # until it has made the steps after which it hangs, and has ended
                answer = await cluster.ask([5, 6, 7], greedy, 200)
                assert answer.tokens == expected.tokens
                accepted += answer.accepted
        finally:
            drafter.kill()
        while cluster.fleet.drafters:  # noqa: ASYNC110 (plain state)
            await asyncio.sleep(0.02)
    assert accepted > 0  # of what it drafted before
    assert drafter.wait(60) == 1
    assert ending.result().splitlines()[-1] == f"outrider drafter: {SENTENCES[thread]}"


def slowly(cluster: Cluster, accepted: list[TokensCommitted]) -> None:
    """Steps take so long that the answer outlasts the silence: longer until something was accepted."""
    engine = cluster.verifier.stepper._engine
    choose = engine.choose

    def choose_slowly(*work: Any) -> list[int]:
        time.sleep(STEP_SECONDS if accepted else SILENT_STEP_SECONDS)
        return choose(*work)

    engine.choose = choose_slowly
