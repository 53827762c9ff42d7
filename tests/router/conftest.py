"""A real router core (registry, store, recruiter, fleet, sessions) on loopback, and workers whose words the
test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.net.commands import one_by_one
from outrider.net.heartbeat import HEARTBEAT_SECONDS
from outrider.net.outbox import Outbox
from outrider.net.rpc import bind, new_server
from outrider.store.memory import MemoryStore
from outrider.v1 import (
    drafter_pb2,
    drafter_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from outrider.wire.codec import tokenizer_to_wire
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo, WorkerRecord
from outrider.wire.hello import Identity, Role, hello_to_wire
from outrider.wire.load import Load
from outrider.worker.registration import RouterRegistrar, register
from router.fleet import Fleet
from router.metrics import Metrics
from router.registry import Registry
from router.session_log_writer import SessionLogWriter
from router.sessions import Sessions
from router.worker_discovery import WorkerDiscovery

ROUTER = Identity(Role.ROUTER, "router", 1)
EOS = (0, 3)
VOCAB_SIZE = 100


@dataclass
class Worker:
    """A verifier or drafter without a model: it records commands, and says what `say` is given."""

    info: WorkerInfo
    tokenizer: TokenizerFiles
    answers_as: Identity
    server: grpc.aio.Server = field(default_factory=new_server)
    address: str = ""
    commands: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    openings: dict[bytes, int] = field(default_factory=dict)  # the last of each session
    events: Outbox[Any] = field(default_factory=Outbox)
    stream_over: asyncio.Event = field(default_factory=asyncio.Event)
    states: asyncio.Queue[tuple[str | None, str]] = field(default_factory=asyncio.Queue)
    load: Load | None = None
    greeting_load: verifier_pb2.VerifierLoad | None = None
    tried: list[str] = field(default_factory=list)  # of a drafter, which verifiers it was to reach
    unreached: str = ""  # what it answers
    refuses: str = ""  # what a router hears that opens a stream
    takes_joined: bool = True  # of a verifier, whether drafters that joined reach it
    beats: bool = True  # False: it is silent, but for what `say` is given
    registration: asyncio.Task[Any] | None = None
    tokenizer_sent: Callable[..., Any] | None = None  # in the place of `tokenizer`

    @property
    def worker_id(self) -> str:
        return self.info.identity.worker_id

    async def start(self) -> None:
        if self.info.identity.role is Role.VERIFIER:
            verifier_pb2_grpc.add_VerifierServicer_to_server(self, self.server)
        else:
            drafter_pb2_grpc.add_DrafterServicer_to_server(self, self.server)
        self.address = bind(self.server, "127.0.0.1", 0)
        await self.server.start()

    def register(self, router_address: str) -> asyncio.Task[Any]:
        async def run() -> None:
            registrar = RouterRegistrar(router_address)
            try:
                await register(registrar, self.record, on_state=lambda *state: self.states.put_nowait(state))
            finally:
                await registrar.close()

        self.registration = asyncio.create_task(run())
        return self.registration

    def record(self) -> WorkerRecord:
        return WorkerRecord(self.info, self.address, self.load, self.address if self.takes_joined else "")

    async def stop(self) -> None:
        if self.registration is not None:
            self.registration.cancel()
            await asyncio.gather(self.registration, return_exceptions=True)
        await self.server.stop(None)

    def say(self, **event: Any) -> None:
        """What is said of a session is of its last opening, unless it says of which."""
        verifies = self.info.identity.role is Role.VERIFIER
        message = verifier_pb2.VerifierEvents if verifies else drafter_pb2.DrafterEvents
        for told in (event.get(kind, ()) for kind in ("committed", "finished", "failed", "cut_off", "ended")):
            for one in told:
                one.opening = one.opening or self.openings.get(one.session_id, 0)
        assert self.events.put(message(**event))

    async def next_command(self, kind: str) -> Any:
        """The next command of the router, which must be of that kind."""
        command = await self.commands.get()
        assert command.WhichOneof("command") == kind, command
        return getattr(command, kind)

    # The RPCs that the router calls.

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        if self.tokenizer_sent is not None:
            return await self.tokenizer_sent()
        return tokenizer_to_wire(self.tokenizer)

    async def GetInfo(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("the router does not ask")

    async def Speculate(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError("the router does not speculate")

    async def Sessions(self, request_iterator: Any, context: Any) -> None:
        if self.refuses:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses)

        async def record() -> None:
            async for command in one_by_one(request_iterator):
                if command.WhichOneof("command") == "open":
                    self.openings[command.open.session_id] = command.open.opening
                if command.WhichOneof("command") == "reach":
                    self.tried.append(command.reach.verifier_address)
                    reached = drafter_pb2.ReachedVerifier(trouble=self.unreached)
                    self.events.put(drafter_pb2.DrafterEvents(reached=reached))
                elif command.WhichOneof("command") != "hello":
                    self.commands.put_nowait(command)

        async def beat(events: Outbox[Any]) -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                if self.beats:
                    events.put(message())

        recording, beating = asyncio.create_task(record()), asyncio.create_task(beat(self.events))
        verifies = self.info.identity.role is Role.VERIFIER
        message = verifier_pb2.VerifierEvents if verifies else drafter_pb2.DrafterEvents
        greeting = {} if self.greeting_load is None else {"load": self.greeting_load}
        await context.write(message(hello=hello_to_wire(self.answers_as.hello()), **greeting))
        try:
            async for event in self.events:
                await context.write(event)
        finally:
            recording.cancel()
            beating.cancel()
            self.stream_over.set()


@dataclass
class Rig:
    """The router core, serving its registry."""

    address: str
    fleet: Fleet
    sessions: Sessions
    metrics: Metrics
    store: MemoryStore
    discovery: WorkerDiscovery
    workers: list[Worker] = field(default_factory=list)

    def identity(self, name: str) -> Identity:
        """Returns the identity of another router."""
        return Identity(Role.ROUTER, name, 5)

    async def worker(
        self,
        role: Role,
        worker_id: str,
        *,
        incarnation: int = 1,
        model: str = "m",
        fingerprint: str = "",
        tokenizer: str = "tokens",
        numerics: str = "",
        kv_blocks: int = 64,
        answers_as: Identity | None = None,
    ) -> Worker:
        """A worker that listens but has not registered."""
        identity = Identity(role, worker_id, incarnation, fingerprint or f"{role.name} model", tokenizer)
        described = ModelInfo(
            model, identity.model_fingerprint, "Arch", 1000, VOCAB_SIZE, 1024, EOS, "cpu", "float32", True
        )
        described = replace(described, numerics=numerics)
        files = TokenizerFiles(tokenizer, f"json of {tokenizer}", "", {})
        info = WorkerInfo(identity, described, kv_blocks, 16)
        worker = Worker(info, files, answers_as or identity)
        self.workers.append(worker)
        await worker.start()
        return worker

    async def joined(self, role: Role, worker_id: str, **about: Any) -> Worker:
        """A worker that the router has taken in."""
        worker = await self.worker(role, worker_id, **about)
        worker.register(self.address)
        router, reason = await worker.states.get()
        assert router == ROUTER.worker_id, reason
        return worker

    async def verifier(self, worker_id: str = "v", **about: Any) -> Worker:
        return await self.joined(Role.VERIFIER, worker_id, **about)

    async def drafter(self, worker_id: str = "d", **about: Any) -> Worker:
        return await self.joined(Role.DRAFTER, worker_id, **about)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets everything else run until the condition holds; the test's own timeout is the bound."""
        while not condition():  # noqa: ASYNC110 (conditions are plain state, nothing to await)
            await asyncio.sleep(0.005)


@pytest.fixture
def ttl_seconds() -> float:
    """For which a worker that does not beat stays registered: a busy machine lets beats come late. A test in
    which a worker is gone for its silence has another."""
    return 3600.0


@pytest.fixture
async def rig(ttl_seconds: float) -> AsyncIterator[Rig]:
    metrics = Metrics()
    fleet = Fleet(metrics, clock=lambda: 1.0, unix_time=lambda: 1234.5, below=lambda count: 0)
    store = MemoryStore(ttl_seconds)
    log_writer = SessionLogWriter(store.logs, ROUTER.worker_id, metrics)
    sessions = Sessions(fleet, log_writer, max_sessions=4, num_speculative_tokens=8)
    server = new_server()
    Registry(store, metrics).add_to(server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    discovery = WorkerDiscovery(store, fleet, ROUTER)
    recruiting = asyncio.create_task(discovery.run())
    writing = asyncio.create_task(log_writer.run())
    made = Rig(address, fleet, sessions, metrics, store, discovery)
    yield made
    sessions.stop()
    for task in (recruiting, writing):
        task.cancel()
    await asyncio.gather(recruiting, writing, return_exceptions=True)
    for worker in made.workers:
        await worker.stop()
    await server.stop(None)
