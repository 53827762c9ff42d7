"""Times what the verifier does around the forward pass: reads drafts, schedules, reconciles, writes messages.

The real service and stepper, spoken to over gRPC by a router and a drafter in a process of their own, with an
engine that knows its answers without work. What is measured is the processor time of the event loop's thread,
so that nothing else that the machine does is counted, and of all steps the median.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outrider.engine.engine import Engine, Work
from outrider.engine.group import Alone
from outrider.engine.kv_blocks import BlockPool
from outrider.net.conversation import converse
from outrider.net.draft_right import right
from outrider.net.rpc import bind, channel, new_server
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.wire.methods import SPECULATE, VERIFIER_SESSIONS
from outrider.wire.session import SessionParams
from outrider.wire.speculation import Attach, Draft, DraftBatch
from outrider.wire.verifier_sessions import OpenSession, VerifierCommand
from outrider.worker.garbage import spare_what_is_there
from verifier.price import StepTime
from verifier.service import VerifierService
from verifier.stepper import Stepper, StepReport

KEY = b"k" * 16
WARM_UP = 8  # steps
STEPS = 24
STEP_SECONDS = 0.05  # long enough for the peers to answer in, on a machine that does nothing else
MOST_STEP_SECONDS = 2.0
BLOCK = 16
MEMORY_BOUND = {1: 0.04, 2**20: 0.041}  # so that every draft is admitted, and every prompt read at once


def text(position: int, vocab_size: int) -> int:
    """Returns the token at a position, the same for every session."""
    return position * 31 % vocab_size


class ScriptedEngine(Engine):
    """An engine with the target's answers, without its work."""

    def __init__(self, info: ModelInfo, num_blocks: int, drafted: Callable[[], bool]) -> None:
        """Takes the answers from `text`; `drafted` tells if the drafts for the next step are there."""
        self.info = info
        self.pool = BlockPool(num_blocks, BLOCK)
        self.threads = 1
        self.group = Alone(info.vocab_size)
        self._thread = None
        self._drafted = drafted

    def prepare(self, works: Sequence[Work]) -> Any:
        return works

    def choose(
        self, step: Any, rows: Sequence[Row], vocab_size: int | None = None, scores: Any = None
    ) -> list[int]:
        deadline = time.monotonic() + MOST_STEP_SECONDS
        time.sleep(STEP_SECONDS)  # in which the peers do their part
        while not self._drafted() and time.monotonic() < deadline:
            time.sleep(STEP_SECONDS / 10)
        return [
            text(work.start + index + 1, self.info.vocab_size)
            for work in step
            for index in range(len(work.tokens) - work.rows, len(work.tokens))
        ]


def microseconds(
    info: ModelInfo, tokenizer: TokenizerFiles, sessions: int, length: int, drafts: int, messages: int
) -> float:
    """Returns the time a session and a step, of `sessions` that begin with `length` tokens, with `drafts`
    draft tokens each in every step. What the drafter sends while one runs comes in so many messages; half of
    it is overtaken."""
    return asyncio.run(_measured(info, tokenizer, sessions, length, drafts, messages)) / sessions * 1e6


async def _measured(
    info: ModelInfo, tokenizer: TokenizerFiles, sessions: int, length: int, drafts: int, messages: int
) -> float:
    longest = length + (WARM_UP + STEPS) * 2 * (drafts + 1)
    info = replace(
        info, max_context=max(info.max_context, longest)
    )  # nothing is computed: any length will do

    def drafted() -> bool:
        """Returns True if most sessions hold drafts for this step, its own token, and for the next step."""
        open_ones = (stepper.get(number.to_bytes(16, "big")) for number in range(sessions))
        ahead = [len(each.session.tree.path) > 2 * drafts for each in open_ones if each is not None]
        return sum(ahead) > 0.9 * sessions

    engine = ScriptedEngine(info, sessions * (longest // BLOCK + 2), drafted)
    identity = Identity(Role.VERIFIER, "v", 1, info.fingerprint, tokenizer.hash)
    service = VerifierService(WorkerInfo(identity, info, engine.pool.num_blocks, BLOCK), tokenizer)
    verified: list[int] = []  # in each step
    times: list[float] = []  # of the event loop's thread, at the end of each step
    over = asyncio.Event()

    def on_step(report: StepReport) -> None:
        service.on_step(report)
        verified.append(sum(outcome.verified for _, outcome in report.outcomes))
        times.append(time.thread_time())
        if len(verified) == WARM_UP + STEPS:
            over.set()

    spare_what_is_there()  # as a worker does before it serves
    stepper = Stepper(
        engine,
        StepLimits(2**20, 2**20),
        on_step,
        time.monotonic,
        lambda now, *_: now,
        StepTime.measured(MEMORY_BOUND),
        trees=False,
    )
    service.use(stepper)
    server = new_server()
    service.add_to(server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    running = asyncio.create_task(stepper.run())
    numbers = [sessions, length, longest, drafts, messages, info.vocab_size]
    peers = await asyncio.create_subprocess_exec(
        sys.executable, __file__, address, tokenizer.hash, *map(str, numbers)
    )
    ended, gone = asyncio.create_task(over.wait()), asyncio.create_task(peers.wait())
    try:
        await asyncio.wait({ended, running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # raises why it ended
        assert ended.done(), "the process of router and drafter ended"
    finally:
        ended.cancel()
        if not gone.done():
            peers.kill()
        await gone
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)
    share = sum(verified[WARM_UP:]) / (len(verified) - WARM_UP) / (sessions * drafts)
    assert share > 0.7, f"only {share:.0%} of the drafts were verified"
    return median(after - before for before, after in pairwise(times[WARM_UP - 1 :]))


async def _talk(address: str, tokenizer_hash: str, numbers: Sequence[int]) -> None:
    sessions, length, longest, drafts, messages, vocab_size = numbers
    async with channel(address) as connection:
        peers = _Peers(connection, vocab_size, tokenizer_hash)
        await peers.open(sessions, length, longest, drafts)
        while True:
            await peers.draft(drafts, messages)


class _Peers:
    """A router and a drafter."""

    def __init__(self, connection: grpc.aio.Channel, vocab_size: int, tokenizer_hash: str) -> None:
        self._connection, self._vocab_size, self._hash = connection, vocab_size, tokenizer_hash
        self._commands: asyncio.Queue[VerifierCommand] = asyncio.Queue()
        self._batches: asyncio.Queue[DraftBatch] = asyncio.Queue()

    async def open(self, sessions: int, length: int, longest: int, k: int) -> None:
        self._router = converse(self._connection, VERIFIER_SESSIONS, _all(self._commands)).heard()
        self._drafter = converse(self._connection, SPECULATE, _all(self._batches)).heard()
        hello = Identity(Role.ROUTER, "router", 1).hello()
        self._commands.put_nowait(VerifierCommand(hello=hello))
        hello = Identity(Role.DRAFTER, "drafter", 1, "", self._hash).hello()
        self._batches.put_nowait(DraftBatch(hello=hello))
        await anext(self._router)
        await anext(self._drafter)
        self._reading = asyncio.create_task(self._read_events())
        ids = [number.to_bytes(16, "big") for number in range(sessions)]
        self._batches.put_nowait(DraftBatch(attach=[Attach(each, right(KEY, 0)) for each in ids]))
        prompt = [text(position, self._vocab_size) for position in range(length)]
        params = SessionParams(tuple(prompt), SamplingParams(temperature=0.0), longest - length)
        for each in ids:
            self._commands.put_nowait(VerifierCommand(command=OpenSession(each, params, (), k, KEY, 1)))

    async def _read_events(self) -> None:
        async for _ in self._router:
            pass

    async def draft(self, count: int, messages: int) -> None:
        """Drafts for what the next commits say, a longer part of it in each message."""
        commits = list((await anext(self._drafter)).commits)  # what has come can be read once
        ahead = 2 * count + 1  # of which the step under way commits the first half
        for number in range(1, messages + 1):
            told = ahead * number // messages
            survival = bytes(250 - 5 * index for index in range(told))
            drafts = []
            for commit in commits:
                base = commit.base + len(commit.tokens)
                tokens = [text(position, self._vocab_size) for position in range(base, base + told)]
                drafts.append(Draft(commit.session_id, base, tokens, (), survival))
            self._batches.put_nowait(DraftBatch(drafts=drafts, stamp_us=1))


async def _all(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while True:
        yield await queue.get()


if __name__ == "__main__":
    asyncio.run(_talk(sys.argv[1], sys.argv[2], [int(number) for number in sys.argv[3:]]))
