"""The verifier's gRPC service: delegates to the stepper, and carries its results to the peers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc.aio

from outrider.engine import speculator
from outrider.engine.in_use import in_use
from outrider.engine.process_memory import give_back_freed_memory
from outrider.engine.warm_up import warm_up
from outrider.errors import StepHung, Unavailable
from outrider.grammar import Grammars
from outrider.net.heartbeat import HEARTBEAT_SECONDS
from outrider.net.places import host_of
from outrider.net.rpc import WORKER_PING_SECONDS, add_methods, bind, caller, new_server
from outrider.net.tls import opened
from outrider.store.store import Registrar
from outrider.telemetry.tracing import tracer_of
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Role
from outrider.wire.load import VerifierLoad
from outrider.wire.methods import SPECULATE, VERIFIER_SESSIONS
from outrider.wire.speculation import CommitBatch
from outrider.wire.verifier_sessions import VerifierCommand, VerifierEvents
from outrider.worker.described import add_description
from outrider.worker.followers import FollowerProcesses, StartFollowers
from outrider.worker.model import load
from outrider.worker.registration import Registered, check_admitted, registrar_at
from outrider.worker.stepwatch import Pulse, StepWatch, watched
from outrider.worker.worker import JOIN_SHARE, Worker, serve_until_stopped
from verifier.config import VerifierConfig
from verifier.drafters import Drafters
from verifier.orphans import GRACE_SECONDS
from verifier.profile import profile, remembered
from verifier.routers import Routers
from verifier.step_start import lock_step, start_at
from verifier.stepper import Stepper, StepReport
from verifier.ways import Ways

if TYPE_CHECKING:
    from outrider.telemetry.otlp import Otlp

log = logging.getLogger(__name__)


class VerifierService:
    """The service: one object for all streams; the sessions themselves live in the stepper."""

    def __init__(
        self,
        info: WorkerInfo,
        tokenizer: TokenizerFiles,
        grace_seconds: float = GRACE_SECONDS,
        tracer: Otlp | None = None,
    ) -> None:
        """`grace_seconds` is for how long sessions run on after the stream of their router broke. `tracer`
        ends with the service."""
        self.tracer = tracer
        self._info = info
        self._tokenizer = tokenizer
        self._grace_seconds = grace_seconds
        self._stepper: Stepper | None = None
        self._drafters: Drafters | None = None
        self._routers: Routers | None = None

    def use(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._drafters = Drafters(
            stepper,
            self._info.identity,
            time.monotonic,
            lambda *cut: self.routers.cut_off(*cut),
        )
        self._routers = Routers(
            stepper,
            self._drafters,
            self._info.identity,
            self._info.model.vocab_size,
            time.monotonic,
            self._grace_seconds,
        )

    @property
    def stepper(self) -> Stepper:
        assert self._stepper is not None, "the service serves only after use()"
        return self._stepper

    @property
    def drafters(self) -> Drafters:
        assert self._drafters is not None, "the service serves only after use()"
        return self._drafters

    @property
    def routers(self) -> Routers:
        assert self._routers is not None, "the service serves only after use()"
        return self._routers

    # -- what it answers --

    def add_to(self, server: grpc.aio.Server) -> None:
        add_methods(server, {VERIFIER_SESSIONS: self.sessions})
        add_methods(server, {SPECULATE: self.speculate}, decoded=False)
        add_description(server, self._info, self._tokenizer, lambda: self.routers.open)

    def let_joined_in(self, server: grpc.aio.Server) -> None:
        """Lets drafters in at a server that asks for no certificate: the right to draft is all they show."""
        add_methods(server, {SPECULATE: self.speculate_joined}, decoded=False)

    async def sessions(
        self, commands: AsyncIterator[VerifierCommand], context: Any
    ) -> AsyncIterator[VerifierEvents]:
        async with aclosing(self.routers.sessions(commands)) as events:
            async for batch in events:
                yield batch

    async def speculate(self, drafts: AsyncIterator[bytes], context: Any) -> AsyncIterator[CommitBatch]:
        stream = self.drafters.speculate(drafts, host_of(context.peer()), caller(context))
        async with aclosing(stream) as batches:
            async for batch in batches:
                yield batch

    async def speculate_joined(
        self, drafts: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[CommitBatch]:
        stream = self.drafters.speculate(drafts, host_of(context.peer()), joined=True)
        async with aclosing(stream) as batches:
            async for batch in batches:
                yield batch

    # -- what outrider.worker.worker asks --

    async def run(self) -> None:
        await watched(self.stepper.run(), self._watch())

    async def _watch(self) -> NoReturn:
        """Gives signs of life for as long as the steps do. Raises StepHung."""
        watch = StepWatch(HEARTBEAT_SECONDS)
        pulse = Pulse.WELL
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            before, pulse = pulse, watch.tick(self.stepper.under_way)
            if pulse is Pulse.HUNG:
                raise StepHung("a step of the target model does not end; this process can only be replaced")
            if pulse is Pulse.OVERDUE and before is Pulse.WELL:
                log.warning("a step takes much longer than it should; its sessions are given back")
                self.routers.turn_away(Unavailable("a step of this target worker does not end"))
            elif pulse is Pulse.WELL and before is Pulse.OVERDUE:
                log.warning("the step has ended after all")
                self.routers.let_in()
            self.routers.beat()
            self.drafters.beat()

    def load(self) -> VerifierLoad:
        return self.stepper.load

    def stats(self) -> dict[str, float]:
        load = self.stepper.load
        return {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "price": load.price,
            "typical_step_seconds": load.typical_step_seconds,
            "draft_starvation": load.draft_starvation,
            "drafts_rest": load.drafts_rest,
            "draft_gain": load.draft_gain,
            **{f"dropped_{reason}": count for reason, count in self.drafters.dropped.items()},
        }

    async def probe(self) -> None:
        await self.stepper.probe()

    def drain(self) -> None:
        self.stepper.drain()
        self.routers.drain()

    async def until_idle(self) -> None:
        await self.stepper.until_empty()

    def give_back(self) -> None:
        self.routers.give_back()

    async def close_gracefully(self) -> None:
        self.drain()
        self.give_back()
        self.drafters.close_gracefully()
        await self.routers.close_gracefully()

    async def close(self) -> None:
        if self.tracer is not None:
            self.tracer.close()

    def on_step(self, report: StepReport) -> None:
        """Hands a step's results to the streams."""
        self.routers.on_step(report)
        self.drafters.rest(self.stepper.resting, self.stepper.beside)


def _as_told(model: ModelInfo, config: VerifierConfig) -> ModelInfo:
    """Returns the model as it is to be served."""
    most = min(config.max_model_len or model.max_context, model.max_context)
    return replace(model, aliases=config.served_names[1:], max_context=most)


def _profiled(share: float) -> None:
    print(f"outrider verifier: timing steps {share:.0%}", flush=True)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def start(
    config: VerifierConfig, registrar: Registrar, start_followers: StartFollowers = FollowerProcesses
) -> Worker:
    """Returns a verifier that has its model loaded and listens, but is not registered; `start_followers`
    starts the processes that its model is divided among. Raises StartupError."""
    server = new_server(ping_seconds=WORKER_PING_SECONDS)
    listen, tls = config.listen, opened(config.protection.tls)
    port = _port(bind(server, listen.host, listen.port, tls=tls))
    address = listen.advertised_address(port)
    join_address, join_server = address if tls is None else "", None
    if config.join_port is not None:
        join_server = new_server(JOIN_SHARE, WORKER_PING_SECONDS)
        bound = bind(join_server, listen.host, config.join_port, flag="--join-port", tls=tls, mutual=False)
        join_address = listen.advertised_address(_port(bound))
    if config.speculator is not None:
        speculator.look_over(Path(config.speculator))
    await check_admitted(registrar)
    engine, tokenizer, info = await load(
        Role.VERIFIER,
        config.target,
        config.served_names[0],
        config.engine,
        start_followers,
        config.resting_threads,
        max_model_len=config.max_model_len,
    )
    info = replace(info, model=_as_told(info.model, config))
    engine.info = info.model
    service = VerifierService(info, tokenizer, tracer=tracer_of(config.export, info.identity))
    measured = {
        "model": info.identity.model_fingerprint,
        "device": config.engine.device,
        "dtype": config.engine.number_format,
        "quantization": config.engine.quantization,
        "threads": config.engine.threads,
        "tensor_parallel_size": config.engine.tensor_parallel_size,
        "max_batch_tokens": config.limits.max_batch_tokens,
    }
    if config.speculator is not None:
        folder = Path(config.speculator)
        engine.speculating = await engine.run(speculator.load, folder, engine.model)
    await engine.run(warm_up, engine, config.limits.max_batch_tokens)
    step_time = await engine.run(
        remembered,
        config.cache,
        measured,
        lambda: profile(engine, time.perf_counter, _profiled, config.limits.max_batch_tokens),
    )
    give_back_freed_memory()  # what the largest step took
    start_steps = lock_step if config.lock_step else start_at
    ways = Ways(engine, step_time, random.random if config.compare and not config.lock_step else None)
    grammars = Grammars(tokenizer.json, info.model.eos_token_ids, info.model.vocab_size)
    if config.trees and engine.attention.lay_out is None:
        log.info("a step verifies one path of a session's drafts: attention takes no trees here")
    stepper = Stepper(
        engine,
        config.limits,
        service.on_step,
        time.monotonic,
        start_steps,
        step_time,
        grammars,
        ways,
        config.trees,
        service.tracer,
    )
    service.use(stepper)
    service.add_to(server)
    if join_server is not None:
        service.let_joined_in(join_server)
    registered = Registered(registrar)
    return Worker(info, address, service, server, registered, join_address, join_server, in_use(engine))


async def serve(config: VerifierConfig) -> None:
    """Runs a verifier as a process of its own, until a signal. Raises StartupError or PeerRefused."""
    where = config.registration
    worker = await start(config, registrar_at(where.router, where.store, opened(config.protection.tls)))
    await serve_until_stopped(worker, drain_seconds=config.drain_seconds)
