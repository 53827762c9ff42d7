"""Router core, verifier and drafters in one process, joined by real gRPC on loopback: fast enough for many
models."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import grpc.aio

from drafter.config import DrafterConfig
from drafter.draft_model import model_source
from drafter.joining import Joined
from drafter.service import DrafterService
from drafter.stepper import DraftStepper
from drafter.suffix import suffix_source
from outrider.engine import speculator
from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.grammar import Grammars
from outrider.net.commands import one_by_one
from outrider.net.heartbeat import HEARTBEAT_SECONDS
from outrider.net.rpc import bind, channel, new_server
from outrider.options.engine import EngineOptions, StepLimits
from outrider.options.worker import Joining
from outrider.sampling.params import SamplingParams
from outrider.store.memory import MemoryStore
from outrider.v1 import (
    drafter_pb2,
    drafter_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from outrider.wire.codec import tokenizer_to_wire, worker_info_to_wire
from outrider.wire.description import TokenizerFiles, WorkerInfo, WorkerRecord
from outrider.wire.guesses import NO_OWN, OwnCounts
from outrider.wire.hello import Identity, Role, hello_to_wire
from outrider.wire.session import FinishReason, SessionParams
from outrider.worker.registration import RouterRegistrar, register
from router.api.keys import ApiKey, digest
from router.joins import Joins
from router.registry import Registry
from router.requests import GenerationRequest, SessionEnded, TokensCommitted
from router.router import Router
from tests.patient_stepper import PatientStepper
from verifier.service import VerifierService
from verifier.ways import Ways

TOKEN = "dt-outrider-test"  # with which drafters join
KV_BYTES = 16 * 2**20  # what is taken is written at once, by each of hundreds of engines
PATIENCE_SECONDS = 5.0  # only a drafter that has nothing to say lets a step wait so long


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    reason: FinishReason
    accepted: int
    verified: int
    cached_prompt_tokens: int
    steps: int
    own: OwnCounts = NO_OWN  # guesses of the verifier itself
    accepted_of: Mapping[str, int] = field(default_factory=dict)  # by draft model, of several drafters


@dataclass
class Worker:
    """A worker's server and tasks; `kill` ends them at once, as a crash would."""

    server: grpc.aio.Server
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    stepper: Any = None
    service: Any = None
    killed: bool = False

    def start(self, *coroutines: Coroutine[Any, Any, Any]) -> None:
        self.tasks += [asyncio.create_task(coroutine) for coroutine in coroutines]

    async def kill(self) -> None:
        self.killed = True
        for task in self.tasks:
            task.cancel()
        if isinstance(self.service, DrafterService):
            await self.service.close()
        await self.server.stop(0)
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Cluster:
    """`async with Cluster(...) as cluster`: one verifier, and the drafters that are added."""

    def __init__(
        self,
        target: Path,
        *,
        k: int = 4,
        limits: StepLimits | None = None,
        kv_blocks: int | None = None,
        quantization: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        compare: bool = False,
        patience_seconds: float = PATIENCE_SECONDS,
        drafters_per_session: int = 1,
        speculator: Path | None = None,
    ) -> None:
        """`clock`: by which verifiers count their seconds; `compare`: whether drafts rest that do not pay;
        `patience_seconds`: that a step waits for a drafter that has nothing to say."""
        self._clock = clock
        self._compare = compare
        self._patience_seconds = patience_seconds
        self._drafters: list[Worker] = []
        self._target = target
        self._quantization = quantization
        self._kv_blocks = kv_blocks
        self._speculator = speculator
        self._limits = limits or StepLimits()
        self._router = Router(
            MemoryStore(),
            num_speculative_tokens=k,
            max_sessions=256,
            drafters_per_session=drafters_per_session,
        )
        self.fleet, self.sessions = self._router.fleet, self._router.sessions
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        server = new_server()
        Registry(self._router.store, self._router.metrics).add_to(server)
        Joins(lambda: [ApiKey("test", digest(TOKEN))], self._router.discovery, self.fleet).add_to(server)
        self.router_address = bind(server, "127.0.0.1", 0)
        await server.start()
        self._stack.push_async_callback(server.stop, 0)
        await self._router.start()
        self._stack.push_async_callback(self._router.stop, 0)
        self.verifier = await self.add_verifier()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def add_verifier(self, dtype: str | None = None) -> Worker:
        """`dtype`: the number format, if another than the usual one."""
        engine, tokenizer, info = load(Role.VERIFIER, self._target, self._quantization, dtype)
        if self._kv_blocks is not None:
            engine.pool = BlockPool(self._kv_blocks)
            info = replace(info, kv_blocks=self._kv_blocks)
        if self._speculator is not None:
            engine.speculating = speculator.load(self._speculator, engine.model)
        service = VerifierService(info, tokenizer)
        grammars = Grammars(tokenizer.json, info.model.eos_token_ids, info.model.vocab_size)
        ways = Ways(engine, None, random.Random(1).random if self._compare else None)
        stepper = PatientStepper(
            engine,
            self._limits,
            service.on_step,
            self._clock,
            grammars=grammars,
            ways=ways,
            silence=self._patience_seconds,
            expected=lambda: any(not drafter.killed for drafter in self._drafters),
        )
        service.use(stepper)
        server = new_server()
        service.add_to(server)
        return await self._join(Worker(server, stepper=stepper, service=service), info, service.run())

    async def add_joined_drafter(self, draft: Path, url: str) -> Worker:
        """A drafter that opens its stream to the router at `url` by itself, and is never called."""
        service, stepper, info = self._drafter(draft)
        worker = Worker(new_server(), stepper=stepper, service=service)
        membership = Joined(Joining(join=url, token=TOKEN), service, None)
        joined = asyncio.Event()
        worker.start(
            service.run(),
            membership.keep(
                lambda: WorkerRecord(info, "127.0.0.1:1"), lambda by, _: joined.set() if by else None
            ),
        )
        self._stack.push_async_callback(worker.kill)
        async with asyncio.timeout(120):
            await joined.wait()
        self._drafters.append(worker)
        return worker

    async def add_drafter(self, draft: Path, quantization: str | None = None) -> Worker:
        service, stepper, info = self._drafter(draft, quantization)
        server = new_server()
        service.add_to(server)
        return await self._join(Worker(server, stepper=stepper, service=service), info, service.run())

    def _drafter(
        self, draft: Path, quantization: str | None = None
    ) -> tuple[DrafterService, DraftStepper, WorkerInfo]:
        engine, tokenizer, info = load(Role.DRAFTER, draft, quantization)
        service = DrafterService(info, tokenizer)
        stepper = DraftStepper(
            engine,
            self._limits,
            service.on_change,
            service.on_failed,
            time.monotonic,
            grammars=Grammars(tokenizer.json, info.model.eos_token_ids, info.model.vocab_size),
        )
        service.use(stepper)
        return service, stepper, info

    async def add_foreign_drafter(self, draft: Path, branches: bool = True) -> Worker:
        """One whose tokenizer may be another than the target's, as its process would have it."""
        engine = EngineOptions(kv_memory=f"{KV_BYTES // 2**20}MiB", threads=1)
        config = DrafterConfig(
            str(draft), target=str(self._target), engine=engine, limits=self._limits, branches=branches
        )
        source = await model_source(config, None)
        service = DrafterService(source.info, source.tokenizer)
        proposer = source.proposer(service.on_change, service.on_failed)
        service.use(proposer)
        server = new_server()
        service.add_to(server)
        worker = Worker(server, stepper=proposer, service=service)
        return await self._join(worker, source.info, service.run())

    async def add_looking_up(self, answers_bytes: int = 0) -> Worker:
        """A drafter without a model."""
        found = suffix_source(answers_bytes)
        service = DrafterService(found.info, found.tokenizer)
        service.use(found.proposer(service.on_change, service.on_failed))
        server = new_server()
        service.add_to(server)
        return await self._join(Worker(server, service=service), found.info, service.run())

    async def add_garbage_drafter(self, draft: Path, seed: int = 0) -> Worker:
        _, tokenizer, info = load(Role.DRAFTER, draft)
        service = GarbageDrafter(info, tokenizer, random.Random(seed))
        server = new_server()
        drafter_pb2_grpc.add_DrafterServicer_to_server(service, server)
        return await self._join(Worker(server, service=service), info)

    async def _join(self, worker: Worker, info: WorkerInfo, *background: Coroutine[Any, Any, Any]) -> Worker:
        address = bind(worker.server, "127.0.0.1", 0)
        await worker.server.start()
        joined = asyncio.Event()
        registrar = RouterRegistrar(self.router_address)
        self._stack.push_async_callback(registrar.close)
        worker.start(
            *background,
            register(
                registrar,
                lambda: WorkerRecord(info, address, join_address=address),
                on_state=lambda by, _: joined.set() if by else None,
            ),
        )
        self._stack.push_async_callback(worker.kill)
        async with asyncio.timeout(120):
            await joined.wait()
        if info.identity.role is Role.DRAFTER:
            self._drafters.append(worker)
        return worker

    async def ask(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        k: int | None = None,
        cache_salt: bytes = b"",
        ignore_eos: bool = True,
        grammar: str = "",
        on_tokens: Any = None,
    ) -> Answer:
        """Runs one request to its end. `on_tokens(output so far)` is awaited at every step where given."""
        stop = () if ignore_eos and not grammar else tuple(self.sessions.model("").eos_token_ids)
        request = GenerationRequest(
            "", SessionParams(tuple(prompt), sampling, max_tokens, stop, cache_salt, grammar=grammar), k
        )
        return await self.ask_for(request, on_tokens)

    async def ask_for(self, request: GenerationRequest, on_tokens: Any = None) -> Answer:
        """Runs a request to its end, as `ask` does."""
        tokens: list[int] = []
        accepted = verified = cached = steps = 0
        own, accepted_of = NO_OWN, Counter[str]()
        async for event in self.sessions.run(request):
            if isinstance(event, SessionEnded):
                return Answer(tokens, event.reason, accepted, verified, cached, steps, own, accepted_of)
            if not isinstance(event, TokensCommitted):
                continue
            tokens += event.tokens
            accepted, verified = accepted + event.accepted, verified + event.verified
            cached += event.cached_prompt_tokens
            steps, own = steps + 1, own.plus(event.own)
            accepted_of.update({one.name: one.accepted for one in event.drafters})
            if on_tokens is not None:
                await on_tokens(tokens)
        raise AssertionError("the stream of events ended without an end")


def load(
    role: Role, model: Path, quantization: str | None = None, dtype: str | None = None
) -> tuple[Engine, TokenizerFiles, WorkerInfo]:
    engine = load_engine(
        str(model),
        name=model.name,
        kv_memory_bytes=KV_BYTES,
        threads=1,
        drafts=role is Role.DRAFTER,
        quantization=quantization,
        **({} if dtype is None else {"dtype": dtype}),
    )
    tokenizer = load_tokenizer(str(model))
    incarnation = random.getrandbits(64)
    name = f"{role.name.lower()}-{incarnation:x}"
    identity = Identity(role, name, incarnation, engine.info.fingerprint, tokenizer.hash)
    return (
        engine,
        tokenizer,
        WorkerInfo(identity, engine.info, engine.pool.num_blocks, engine.pool.block_size),
    )


TAME_COMMITS = 4


class GarbageDrafter(drafter_pb2_grpc.DrafterServicer):
    """Registers as any drafter does and then sends nonsense for every session that it is given."""

    def __init__(self, info: WorkerInfo, tokenizer: TokenizerFiles, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._rng = rng

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return worker_info_to_wire(self._info)

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        return tokenizer_to_wire(self._tokenizer)

    async def Sessions(self, request_iterator: Any, context: Any) -> Any:
        tasks = []
        commands = one_by_one(request_iterator)
        coming = asyncio.ensure_future(anext(commands, None))
        try:
            while True:
                await asyncio.wait((coming,), timeout=HEARTBEAT_SECONDS)
                if not coming.done():
                    yield drafter_pb2.DrafterEvents(load=drafter_pb2.DrafterLoad())
                    continue
                if (command := coming.result()) is None:
                    return
                coming = asyncio.ensure_future(anext(commands, None))
                if command.HasField("hello"):
                    yield drafter_pb2.DrafterEvents(hello=hello_to_wire(self._info.identity.hello()))
                elif command.HasField("open"):
                    tasks.append(asyncio.create_task(self._babble(command.open)))
        finally:
            for task in (coming, *tasks):
                task.cancel()

    async def _babble(self, session: drafter_pb2.OpenDraft) -> None:
        ends = [len(session.params.prompt)]  # of the log, as told: some of the nonsense is to be verified
        async with channel(session.verifier_address) as connection:
            stub = verifier_pb2_grpc.VerifierStub(connection)
            async for batch in stub.Speculate(self._nonsense(session, ends)):
                ends += [commit.base + len(commit.tokens) for commit in batch.commits]

    async def _nonsense(self, session: drafter_pb2.OpenDraft, ends: list[int]) -> Any:
        rng, start = self._rng, len(session.params.prompt)
        attach = verifier_pb2.Attach(session_id=session.session_id, draft_key=session.draft_key)
        yield verifier_pb2.DraftBatch(hello=hello_to_wire(self._info.identity.hello()))
        yield verifier_pb2.DraftBatch(attach=[attach])
        while True:
            count = rng.randrange(12)
            # Wrong tokens at first, some of which are verified; later also what no drafter may send, until it
            # is cut off for it.
            wild = len(ends) > TAME_COMMITS and rng.random() < 0.5
            odd = wild and rng.random() < 0.3
            draft = verifier_pb2.Draft(
                session_id=rng.randbytes(rng.randrange(20)) if odd else session.session_id,
                base=rng.choice([start + rng.randrange(40), 0, 2**32 - 1, start]) if wild else ends[-1],
                tokens=[rng.randrange(2**32 if wild else 199) for _ in range(count)],
                parents=[rng.randrange(-3, count + 1) for _ in range(count)] if odd else [],
                survival=rng.randbytes(rng.choice([0, count, 3]) if wild else count),
            )
            yield verifier_pb2.DraftBatch(drafts=[draft], stamp_us=rng.getrandbits(64))
            await asyncio.sleep(0.001)
