"""Two routers, two verifiers and a store without sockets: the services' own objects, all messages in hand.

What the model runs is replaced by a function of the prefix, the network by queues from which the test takes.
The code of routers and verifiers is as it runs: Sessions, Session, Logbook, Fleet and Verifier of the former,
Routers and Session of the latter.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from outrider.errors import OutriderError, Unavailable
from outrider.net.outbox import Outbox
from outrider.store.logs import Append, Claim, Lead, Taken
from outrider.store.memory_logs import MemorySessionLogs
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.wire.load import VerifierLoad
from outrider.wire.session import SessionId
from outrider.wire.verifier_sessions import VerifierCommand, VerifierEvents
from router.compatibility import Registration
from router.fleet import Fleet
from router.metrics import Metrics
from router.pool import drawn
from router.requests import GenerationRequest, SessionBegun, SessionEnded, SessionEvent, TokensCommitted
from router.session_log_writer import SessionLogWriter
from router.sessions import Sessions
from router.workers import Verifier
from verifier.drafters import Drafters
from verifier.routers import Routers
from verifier.running import Running
from verifier.session import Outcome, Session, SessionSpec
from verifier.stepper import StepReport

VOCAB = 11
TTL = 1e9
TURNS = 40  # of the event loop: what is ready has run then


def target_token(prefix: Sequence[int]) -> int:
    return zlib.crc32(bytes(prefix)) % VOCAB


def reference(prompt: Sequence[int], count: int) -> list[int]:
    log = list(prompt)
    while len(log) < len(prompt) + count:
        log.append(target_token(log))
    return log[len(prompt) :]


async def idle() -> None:
    """Until what is ready has run."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Engine:
    """Takes the place of verifier.stepper.Stepper: it has sessions, and steps when the test says so."""

    def __init__(self) -> None:
        self.running: dict[bytes, Running] = {}
        self.load = VerifierLoad()

    def get(self, session_id: bytes) -> Running | None:
        return self.running.get(session_id)

    def open(self, spec: SessionSpec, num_speculative_tokens: int) -> Running:
        assert spec.session_id not in self.running, "opened twice"
        assert spec.params.max_tokens > len(spec.output), "opened beyond its end"
        running = self.running[spec.session_id] = Running(Session(spec, num_speculative_tokens), None)
        return running

    def close(self, session_id: bytes) -> Running | None:
        return self.running.pop(session_id, None)

    def draft(self, running: Running, tokens: int, right: bool) -> None:
        """A drafter guesses so many tokens, all right or the last one wrong."""
        session = running.session
        path = reference(session.log, tokens)
        if not right:
            path[-1] = (path[-1] + 1) % VOCAB
        session.offer(len(session.log), path, (), b"")

    def step(self) -> StepReport:
        outcomes: list[tuple[Running, Outcome]] = []
        for running in list(self.running.values()):
            session = running.session
            nodes = session.nodes(least=0.0)
            chosen = [target_token([*session.log, *path]) for path in [[], *nodes.paths]]
            outcome = session.verify(nodes, chosen)
            if outcome.finish is not None:
                self.close(running.id)
            outcomes.append((running, outcome))
        return StepReport(tuple(outcomes), (), self.load)


class VerifierNode:
    """A verifier process; `incarnation` counts its lives."""

    def __init__(self, name: str, clock: Any) -> None:
        self.name = name
        self._clock = clock
        self.incarnation = 0
        self.restart()

    def restart(self) -> None:
        self.incarnation += 1
        identity = Identity(Role.VERIFIER, self.name, self.incarnation, "target", "tokens")
        model = ModelInfo("m", "target", "A", 1, VOCAB, 10_000, (), "cpu", "float32", True, 1)
        self.info = WorkerInfo(identity, model, 10_000, 16)
        self.engine = Engine()
        drafters = Drafters(self.engine, identity, self._clock, lambda *_: None)  # type: ignore[arg-type]
        self.routers = Routers(
            self.engine,  # type: ignore[arg-type]
            drafters,
            identity,
            VOCAB,
            self._clock,
        )

    def step(self) -> None:
        self.routers.on_step(self.engine.step())


class Wire:
    """A Sessions stream between a router and a verifier: what was sent, and has not arrived."""

    def __init__(self, router: RouterNode, node: VerifierNode) -> None:
        self.commands: deque[Any] = deque()
        self.events: deque[Any] = deque()
        self.last: Any = None  # of the events that arrived
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()  # at the verifier
        registration = Registration(node.info, node.name, TokenizerFiles("tokens", "", "", {}))
        self.handle = Verifier(registration, self, None)  # type: ignore[arg-type]
        self._arrived.put_nowait(VerifierCommand(hello=router.identity.hello()))
        self._stream: AsyncGenerator[Any, None] = node.routers.sessions(self._at_verifier())
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._answer())]

    # As gRPC's channel and call, for router.workers.Verifier.

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return None

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        def call(outbox: Outbox[Any], **options: Any) -> Wire:
            self._outbox = outbox
            return self

        return call

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        raise AssertionError("events are given to the handle")

    def cancel(self) -> None:
        raise AssertionError("the outbox is full")

    def add_done_callback(self, _: object) -> None: ...

    # What passes.

    async def _send(self) -> None:
        async for command in self._outbox:
            self.commands.append(command)

    async def _answer(self) -> None:
        async for events in self._stream:
            if events.hello is None:
                self.events.append(events)

    async def _at_verifier(self) -> AsyncIterator[Any]:
        while (command := await self._arrived.get()) is not None:
            yield command

    def deliver_command(self) -> None:
        self._arrived.put_nowait(self.commands.popleft())

    def deliver_events(self) -> None:
        self.last = self.events.popleft()
        self.handle._dispatch(self.last)

    def repeat_events(self) -> None:
        """The last ones once more, without their ends."""
        again = VerifierEvents(committed=self.last.committed)
        self.handle._dispatch(again)

    async def cut(self) -> None:
        """What was on its way is lost; the verifier notices."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stream.aclose()


class Storage:
    """The store's logs as one router reaches them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.away = False
        self.answers_lost = False  # it does what it is asked, and is not heard

    def _check(self, before: bool) -> None:
        if self.away or (self.answers_lost and not before):
            raise Unavailable("the store is away")

    async def append(self, appends: Sequence[Append], ttl_seconds: float) -> list[int | None]:
        self._check(before=True)
        lengths = await self._world.logs.append(appends, ttl_seconds)
        self._check(before=False)
        return lengths

    async def take(
        self, session_id: SessionId, name: str, ttl_seconds: float, lead: Lead | None = None
    ) -> Taken | None:
        self._check(before=True)
        taken = await self._world.logs.take(session_id, name, ttl_seconds, lead)
        self._check(before=False)
        return taken

    async def read(self, session_id: SessionId) -> bytes | None:
        self._check(before=True)
        return await self._world.logs.read(session_id)

    async def cancel(self, session_id: SessionId) -> None:
        self._check(before=True)
        await self._world.logs.cancel(session_id)

    async def claim(self, session_id: SessionId) -> Claim | None:
        self._check(before=True)
        return await self._world.logs.claim(session_id)

    async def last(self, session_id: SessionId) -> bytes | None:
        self._check(before=True)
        return await self._world.logs.last(session_id)


class RouterNode:
    """A router process, and its wires to the verifiers."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self._world = world
        self._lives = 0
        self.restart()

    def restart(self) -> None:
        self._lives += 1
        self.identity = Identity(Role.ROUTER, f"{self.name}-{self._lives}", self._lives)
        metrics = Metrics()
        self.storage = Storage(self._world)
        self.log_writer = SessionLogWriter(self.storage, self.identity.worker_id, metrics, TTL)
        # Drawn from a seed: hypothesis runs the same rules again, and they must lead to the same.
        self.fleet = Fleet(metrics, clock=lambda: self._world.now, below=drawn(seed=self._lives))
        self.sessions = Sessions(self.fleet, self.log_writer, max_sessions=100, num_speculative_tokens=4)
        self.wires: dict[str, Wire] = {}

    def connect(self, node: VerifierNode) -> None:
        wire = self.wires[node.name] = Wire(self, node)
        self.fleet.add_verifier(wire.handle)

    async def lose(self, node: VerifierNode) -> None:
        """The stream to a verifier ends."""
        wire = self.wires.pop(node.name)
        await wire.cut()
        self.fleet.remove(wire.handle)

    async def write(self) -> None:
        """One writing of what sessions have to be logged; a store that is away is noticed."""
        cursors = deque(self.log_writer._dirty.values())
        if cursors:
            try:
                await self.log_writer._write(self.log_writer._one_writing(cursors))
            except Unavailable:
                return

    async def die(self) -> None:
        """Nothing of it goes on: its streams end without a word."""
        self.storage.away = True
        for wire in self.wires.values():
            await wire.cut()
        self.wires.clear()


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.logs = MemorySessionLogs(clock=lambda: self.now)
        self.verifiers = [VerifierNode(f"v{number}", lambda: self.now) for number in range(2)]
        self.routers = [RouterNode(f"r{number}", self) for number in range(2)]
        for router in self.routers:
            for node in self.verifiers:
                router.connect(node)

    def forget(self) -> None:
        """The store loses its memory."""
        self.logs = MemorySessionLogs(clock=lambda: self.now)


class Client:
    """Reads one answer through whichever router, and remembers what it has."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.ended = False
        self.lost = 0  # how often its log was
        self.error: OutriderError | None = None  # that broke the stream off
        self._reading: asyncio.Task[None] | None = None

    @property
    def reading(self) -> bool:
        return self._reading is not None and not self._reading.done()

    def begin(self, router: RouterNode) -> None:
        self._reading = asyncio.create_task(self._read(router.sessions.run(self.request)))

    def resume(self, router: RouterNode) -> None:
        assert self.request.session_id is not None
        self._reading = asyncio.create_task(self._read(router.sessions.resume(self.request.session_id)))

    async def leave(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None

    def _take(self, step: TokensCommitted, position: int) -> int:
        known = self.tokens[position : position + len(step.tokens)]
        assert list(step.tokens[: len(known)]) == known, "told otherwise than before"
        self.tokens += step.tokens[len(known) :]
        return position + len(step.tokens)

    async def _read(self, events: AsyncGenerator[SessionEvent, None]) -> None:
        position = 0
        self.error = None
        try:
            async for event in events:
                match event:
                    case SessionBegun(known=known):
                        for step in known:
                            position = self._take(step, position)
                    case TokensCommitted():
                        position = self._take(event, position)
                    case SessionEnded():
                        assert position == len(self.tokens), "ended before what it had told"
                        self.ended = True
        except OutriderError as error:
            self.error = error
        finally:
            await events.aclose()
