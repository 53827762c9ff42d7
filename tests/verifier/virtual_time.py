"""A verifier whose seconds are counted, not waited for: an event loop that jumps to what is due next, and a
target model that is a function of the position and takes what its tokens cost."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

from outrider.engine.engine import Work
from outrider.engine.kv_blocks import BlockPool
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.sampling.shaping import Row
from outrider.wire.hello import Identity, Role
from outrider.wire.session import SessionParams
from outrider.wire.speculation import DraftBatch
from outrider.wire.verifier_sessions import OpenSession, VerifierCommand
from verifier.drafter_peer import DrafterPeer
from verifier.drafters import Drafters
from verifier.price import StepTime
from verifier.routers import Routers
from verifier.stepper import Stepper, StepReport

VOCAB = 199
PROMPT = (1, 2, 3)
KEY = b"k" * 16


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing but timers is waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout:
            self._loop.now += timeout
        return found


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def truth(position: int) -> int:
    """The target's token there."""
    return (position * 2654435761 >> 7) % VOCAB


class Target:
    """In the place of an engine."""

    speculating: Any = None

    def __init__(self, step_time: StepTime) -> None:
        self.info = SimpleNamespace(vocab_size=VOCAB, max_context=10**6)
        self.pool = BlockPool(4096)
        self._step_time = step_time

    def prepare(self, works: Sequence[Work]) -> Sequence[Work]:
        return works

    def choose(self, works: Sequence[Work], rows: Sequence[Row]) -> list[int]:
        return [truth(row.position) for row in rows]

    async def run_step(self, call: Callable[..., Any], works: Sequence[Work], rows: Sequence[Row]) -> Any:
        await asyncio.sleep(self._step_time.at(sum(len(work.tokens) for work in works)))
        return call(works, rows)

    async def serve(self, steps: Awaitable[None]) -> None:
        await steps


class Verifier:
    """One session at a verifier, and what its steps showed."""

    def __init__(self, seconds: dict[int, float], target: Target | None = None) -> None:
        self.clock = asyncio.get_running_loop().time
        engine: Any = target or Target(StepTime.measured(seconds))
        identity = Identity(Role.VERIFIER, "v", 1)
        self.stepper = Stepper(
            engine,
            StepLimits(),
            self._on_step,
            self.clock,
            step_time=StepTime.measured(seconds),
            trees=False,
        )
        self.drafters = Drafters(
            self.stepper, identity, self.clock, lambda *cut: self.routers.cut_off(*cut), lambda: 0.0
        )
        self.routers = Routers(self.stepper, self.drafters, identity, VOCAB, self.clock)
        self.committed = self.verified = self.accepted = 0
        self.read = 0  # messages of drafters
        self._take, self.drafters._take = self.drafters._take, self._counted  # type: ignore[method-assign]

    async def _counted(self, peer: DrafterPeer, batch: DraftBatch) -> None:
        self.read += 1
        await self._take(peer, batch)

    def _on_step(self, report: StepReport) -> None:
        self.routers.on_step(report)
        for _, outcome in report.outcomes:
            self.committed += len(outcome.tokens)
            self.verified += outcome.verified
            self.accepted += outcome.accepted

    async def commands(self, session_id: bytes, k: int) -> AsyncIterator[VerifierCommand]:
        yield VerifierCommand(hello=Identity(Role.ROUTER, "r", 1).hello())
        params = SessionParams(PROMPT, SamplingParams(temperature=0.0), 30_000)
        yield VerifierCommand(command=OpenSession(session_id, params, (), k, KEY, 1))
        await asyncio.Event().wait()

    async def serve(self, session_id: bytes, k: int) -> None:
        """Has a session run until it is cancelled."""
        steps = asyncio.create_task(self.stepper.run())
        try:
            async for _ in self.routers.sessions(self.commands(session_id, k)):
                pass
        finally:
            steps.cancel()
