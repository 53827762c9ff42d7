"""The verifier's gRPC service: converts, delegates to the stepper, and carries its results to the peers."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from outrider.engine.scheduler import Limits
from outrider.errors import Cancelled, OutriderError, Unavailable
from outrider.followers import FollowerProcesses, StartFollowers
from outrider.model import load
from outrider.registration import registrar_at
from outrider.rpc import Role, bind, new_server, read_hello
from outrider.store.store import Registrar, WorkerLoad
from outrider.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.wire.codec import (
    SESSION_ID_BYTES,
    sampling_from_wire,
    session_id_from_wire,
    tokenizer_to_wire,
    worker_info_to_wire,
)
from outrider.wire.description import TokenizerFiles, WorkerInfo
from outrider.worker import Worker, serve_until_stopped
from verifier.config import VerifierConfig
from verifier.pace import lock_step, start_at
from verifier.peers import DrafterPeer, RouterPeer, load_to_wire
from verifier.profile import profile, remembered
from verifier.session import DraftFate, SessionSpec
from verifier.stepper import Running, Stepper, StepReport

log = logging.getLogger(__name__)

MAX_KEY_BYTES = 64
REMEMBERED = (
    4096  # attachments that wait for their session, sessions that ended or are not to begin: a bound each
)
LAST_WORDS_SECONDS = 0.5


class VerifierService(verifier_pb2_grpc.VerifierServicer):
    """One object for all streams; the sessions themselves live in the stepper."""

    def __init__(self, info: WorkerInfo, tokenizer: TokenizerFiles) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._stepper: Stepper | None = None
        self._peers: set[RouterPeer] = set()
        self._routers: dict[bytes, RouterPeer] = {}  # session -> who opened it
        self._drafters: dict[bytes, DrafterPeer] = {}  # session -> who drafts for it
        self._claims: OrderedDict[bytes, tuple[DrafterPeer, bytes]] = (
            OrderedDict()
        )  # came before their session
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._cancelled: OrderedDict[bytes, None] = OrderedDict()  # before they came here
        self.dropped: Counter[str] = Counter()  # drafts, by reason

    def use(self, stepper: Stepper) -> None:
        self._stepper = stepper

    @property
    def stepper(self) -> Stepper:
        assert self._stepper is not None, "the service serves only after use()"
        return self._stepper

    # -- unary calls --

    async def GetInfo(self, request: common_pb2.GetInfoRequest, context: Any) -> common_pb2.WorkerInfo:
        return worker_info_to_wire(self._info)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> common_pb2.Tokenizer:
        return tokenizer_to_wire(self._tokenizer)

    # -- what outrider.worker asks --

    async def run(self) -> None:
        await self.stepper.run()

    def load(self) -> WorkerLoad:
        load = self.stepper.load
        return WorkerLoad(
            sessions=load.running + load.waiting,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            step_seconds=load.typical_step_seconds,
            draining=load.draining,
            draft_starvation=load.draft_starvation,
        )

    def stats(self) -> dict[str, float]:
        load = self.stepper.load
        return {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "price": load.price,
            "typical_step_seconds": load.typical_step_seconds,
            "draft_starvation": load.draft_starvation,
        }

    def probe(self) -> None:
        self.stepper.probe()

    def drain(self) -> None:
        self.stepper.drain()
        for router in self._peers:
            router.report(self.stepper.load)

    async def until_idle(self) -> None:
        await self.stepper.until_empty()
        # The last ends are still on their way, and a router hangs up as soon as it hears that we leave.
        await asyncio.sleep(LAST_WORDS_SECONDS)

    def give_back(self) -> None:
        for session_id, router in list(self._routers.items()):
            self._close(session_id, over=False)
            router.failed(session_id, Unavailable("this target worker leaves"))

    async def close(self) -> None:
        return

    # -- routers --

    async def Sessions(
        self, request_iterator: AsyncIterator[verifier_pb2.VerifierCommand], context: Any
    ) -> AsyncIterator[verifier_pb2.VerifierEvents]:
        _, commands = await read_hello(request_iterator, Role.ROUTER)
        load = self.stepper.load
        peer = RouterPeer(load)
        self._peers.add(peer)
        reader = asyncio.create_task(self._obey(peer, commands))
        try:
            yield verifier_pb2.VerifierEvents(hello=self._info.identity.hello(), load=load_to_wire(load))
            async for events in peer.events():
                yield events
            await reader  # raises what ended it
        finally:
            reader.cancel()
            self._peers.discard(peer)
            for session_id in [key for key, owner in self._routers.items() if owner is peer]:
                self._close(session_id, over=False)

    async def _obey(self, peer: RouterPeer, commands: AsyncIterator[verifier_pb2.VerifierCommand]) -> None:
        try:
            async for command in commands:
                match command.WhichOneof("command"):
                    case "open":
                        self._open(peer, command.open)
                    case "speculation":
                        running = self.stepper.get(command.speculation.session_id)
                        if running is not None:
                            running.session.num_speculative_tokens = (
                                command.speculation.num_speculative_tokens
                            )
                    case "close":
                        self._close(command.close.session_id)
                        peer.report(self.stepper.load)
                    case "cancel":
                        self._cancel(command.cancel.session_id)
        finally:
            peer.end()

    def _open(self, peer: RouterPeer, message: verifier_pb2.OpenSession) -> None:
        try:
            spec = SessionSpec(
                session_id=session_id_from_wire(message.session_id),
                prompt=tuple(message.prompt),
                output=tuple(message.output),
                sampling=sampling_from_wire(message.sampling),
                max_tokens=message.max_tokens,
                stop_token_ids=frozenset(message.stop_token_ids),
                vocab_size=self._info.model.vocab_size,
                draft_key=message.draft_key,
            )
            if spec.session_id in self._cancelled:
                raise _cancelled()
            if self._routers.get(spec.session_id, peer) is not peer:
                # Its router is back before the end of its former stream has been noticed here.
                self._close(spec.session_id, over=False)
            running = self.stepper.open(spec, message.num_speculative_tokens)
        except OutriderError as error:
            peer.failed(message.session_id, error)
            return
        self._routers[spec.session_id] = peer
        self._ended.pop(spec.session_id, None)  # it may have been here before, and come back
        claim = self._claims.pop(spec.session_id, None)
        if claim is not None:
            self._attach(running, *claim)

    def _cancel(self, session_id: bytes) -> None:
        """Ends a session, whoever opened it: now, or when it comes, as it may be moving here."""
        router = self._routers.get(session_id)
        if router is not None:
            self._close(session_id)
            router.failed(session_id, _cancelled())
        elif len(session_id) == SESSION_ID_BYTES:
            _remember(self._cancelled, session_id)

    def _close(self, session_id: bytes, over: bool = True) -> None:
        self._forget(session_id, over)
        self.stepper.close(session_id)

    def _forget(self, session_id: bytes, over: bool = True) -> None:
        """Lets go of a session. Its drafter is told where it is over; of one that goes on elsewhere, or may
        come back, it hears from the router alone: our word would end what the router has begun anew."""
        self._routers.pop(session_id, None)
        self._claims.pop(session_id, None)
        drafter = self._drafters.pop(session_id, None)
        if over:
            if drafter is not None:
                drafter.ended(session_id)
            _remember(self._ended, session_id)

    # -- drafters --

    async def Speculate(
        self, request_iterator: AsyncIterator[verifier_pb2.DraftBatch], context: Any
    ) -> AsyncIterator[verifier_pb2.CommitBatch]:
        _, batches = await read_hello(
            request_iterator, Role.DRAFTER, tokenizer_hash=self._info.identity.tokenizer_hash
        )
        peer = DrafterPeer(time.monotonic)
        reader = asyncio.create_task(self._listen(peer, batches))
        try:
            yield verifier_pb2.CommitBatch(hello=self._info.identity.hello())
            async for batch in peer.batches():
                yield batch
            await reader  # raises what ended it
        finally:
            reader.cancel()
            self._detach(peer)

    async def _listen(self, peer: DrafterPeer, batches: AsyncIterator[verifier_pb2.DraftBatch]) -> None:
        try:
            async for batch in batches:
                peer.heard(batch.stamp_us)
                for attach in batch.attach:
                    self._claim(peer, attach)
                for draft in batch.drafts:
                    self._offer(peer, draft)
        finally:
            peer.end()

    def _claim(self, peer: DrafterPeer, attach: verifier_pb2.Attach) -> None:
        if len(attach.session_id) != SESSION_ID_BYTES or len(attach.draft_key) > MAX_KEY_BYTES:
            self.dropped["bad_attach"] += 1
            return
        running = self.stepper.get(attach.session_id)
        if running is not None:
            self._attach(running, peer, attach.draft_key)
        elif attach.session_id in self._ended:
            peer.ended(attach.session_id)
        else:  # the drafter was faster than the router's Open
            self._claims[attach.session_id] = (peer, attach.draft_key)
            if len(self._claims) > REMEMBERED:
                self._claims.popitem(last=False)

    def _attach(self, running: Running, peer: DrafterPeer, draft_key: bytes) -> None:
        spec = running.session.spec
        if not spec.draft_key or not hmac.compare_digest(spec.draft_key, draft_key):
            self.dropped["wrong_key"] += 1
            peer.ended(spec.session_id)
            return
        before = self._drafters.get(spec.session_id)
        if before is not None and before is not peer:
            before.ended(spec.session_id)
        self._drafters[spec.session_id] = peer
        running.drafted_by(peer.pace)
        running.session.acknowledged = len(spec.prompt) + len(spec.output)  # what the router told it
        peer.committed(running.session)

    def _offer(self, peer: DrafterPeer, draft: verifier_pb2.Draft) -> None:
        session_id = draft.session_id
        running = self.stepper.get(session_id)
        if running is None or self._drafters.get(session_id) is not peer:
            self.dropped["not_attached"] += 1
            if session_id in self._ended:
                peer.ended(session_id)
            return
        tokens = list(draft.tokens)
        fate = self.stepper.offer(running, draft.base, tokens, draft.parents, draft.survival)
        if fate is not DraftFate.TAKEN and tokens:
            self.dropped[fate.value] += 1

    def _detach(self, peer: DrafterPeer) -> None:
        """Its sessions decode plainly from now on."""
        for session_id in [key for key, drafter in self._drafters.items() if drafter is peer]:
            del self._drafters[session_id]
            running = self.stepper.get(session_id)
            if running is not None:
                running.drafted_by(None)
        for session_id in [key for key, (claimer, _) in self._claims.items() if claimer is peer]:
            del self._claims[session_id]

    # -- results --

    def on_step(self, report: StepReport) -> None:
        """Hands a step's results to the streams: one batch for each peer."""
        for running, outcome in report.outcomes:
            router = self._routers.get(running.id)
            if router is None:
                continue  # closed since
            router.committed(running, outcome)
            if outcome.finish is not None:
                self._forget(running.id)
            elif (drafter := self._drafters.get(running.id)) is not None:
                drafter.committed(running.session)
        for running in report.failed:
            router = self._routers.get(running.id)
            if router is not None:
                router.failed(
                    running.id, OutriderError("the target worker failed on this request; send it again")
                )
            self._forget(running.id)
        for router in self._peers:
            router.report(report.load)


def _profiled(share: float) -> None:
    print(f"outrider verifier: timing steps {share:.0%}", flush=True)


def _cancelled() -> Cancelled:
    return Cancelled("the request was cancelled")


def _remember(ids: OrderedDict[bytes, None], session_id: bytes) -> None:
    ids[session_id] = None
    if len(ids) > REMEMBERED:
        ids.popitem(last=False)


async def start(
    config: VerifierConfig, registrar: Registrar, start_followers: StartFollowers = FollowerProcesses
) -> Worker:
    """A verifier with its model loaded, listening but not registered; `start_followers` starts the processes
    that its model is divided among. Raises StartupError."""
    server = new_server()
    address = bind(server, config.host, config.port)
    engine, tokenizer, info = await load(
        Role.VERIFIER,
        config.target,
        config.served_name,
        config.device,
        config.dtype,
        config.kv_memory_bytes,
        config.threads,
        config.tensor_parallel_size,
        start_followers,
    )
    service = VerifierService(info, tokenizer)
    limits = Limits(config.max_batch_tokens, config.prefill_chunk)
    measured = {
        "model": info.identity.model_fingerprint,
        "device": config.device,
        "dtype": config.dtype,
        "threads": config.threads,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_batch_tokens": config.max_batch_tokens,
    }
    step_time = await asyncio.to_thread(
        remembered,
        config.cache,
        measured,
        lambda: profile(engine, time.perf_counter, _profiled, config.max_batch_tokens),
    )
    start_steps = lock_step if config.lock_step else start_at
    stepper = Stepper(engine, limits, service.on_step, time.monotonic, start_steps, step_time)
    service.use(stepper)
    verifier_pb2_grpc.add_VerifierServicer_to_server(service, server)
    port = int(address.rpartition(":")[2])
    return Worker(info, config.advertised_address(port), service, server, registrar)


async def serve(config: VerifierConfig) -> None:
    """Runs a verifier as a process of its own, until a signal. Raises StartupError or PeerRefused."""
    worker = await start(config, registrar_at(config.router, config.store))
    await serve_until_stopped(worker, drain_seconds=config.drain_seconds)
