"""The drafter's gRPC service: delegates to the proposer, and keeps a link to each verifier."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc.aio

from drafter.config import DrafterConfig
from drafter.draft_spans import DraftSpans
from drafter.joining import Joined, token_of
from drafter.link import VerifierLink
from drafter.proposer import Proposer, Source
from drafter.session import DraftSession, DraftSpec
from outrider.errors import OutriderError, StepHung
from outrider.net.commands import one_by_one
from outrider.net.diagnosis import why_unreachable
from outrider.net.heartbeat import HEARTBEAT_SECONDS, IDLE_HEARTBEATS
from outrider.net.rpc import WORKER_PING_SECONDS, add_methods, bind, new_server
from outrider.net.tasks import cancel
from outrider.net.tls import Credentials, Trust, opened
from outrider.store.store import Registrar
from outrider.telemetry.tracing import tracer_of
from outrider.wire.description import TokenizerFiles, WorkerInfo
from outrider.wire.drafter_sessions import (
    MOST_ENDED,
    CloseDraft,
    DraftEndCause,
    DraftEnded,
    DrafterCommand,
    DrafterEvents,
    OpenDraft,
    ReachVerifier,
    SetWindow,
)
from outrider.wire.hello import Role, read_hello
from outrider.wire.load import WORTH_TELLING, DrafterLoad
from outrider.wire.methods import DRAFTER_SESSIONS
from outrider.wire.registry import is_address
from outrider.wire.session import SESSION_ID_BYTES
from outrider.worker.described import add_description
from outrider.worker.registration import Registered, check_admitted, registrar_at
from outrider.worker.stepwatch import Pulse, StepWatch, watched
from outrider.worker.worker import Worker, serve_until_stopped

if TYPE_CHECKING:
    from outrider.telemetry.otlp import Otlp
    from outrider.worker.followers import StartFollowers


REACHING_SECONDS = 5.0  # that a busy verifier may take until it is said that it is not reached
PAUSE_SECONDS = 0.05  # between two messages to a router: what comes meanwhile goes in one


class RouterPeer:
    """The events for one router."""

    def __init__(self) -> None:
        self.ended: list[DraftEnded] = []
        self.reached: str | None = None  # as DrafterEvents has it
        self.sessions = 0  # of its, here
        self.over = False
        self.wake = asyncio.Event()

    def end(self, session_id: bytes, opening: int, cause: DraftEndCause, reason: str) -> None:
        """Tells the router that the drafter stopped drafting for a session, as that was opened then."""
        self.ended.append(DraftEnded(session_id, cause, reason, opening))
        self.wake.set()


def is_news(seconds: float, told: float | None) -> bool:
    """Returns whether a round trip is to be told to a router that was told the other one."""
    return told is None or abs(seconds - told) > WORTH_TELLING * told


class BusyShare:
    """Tells which share of the time went into guesses since it was asked last, 0..1."""

    def __init__(self, busy_seconds: float = 0.0) -> None:
        self._busy_seconds, self._asked = busy_seconds, time.monotonic()

    def since_last(self, busy_seconds: float) -> float:
        now = time.monotonic()
        busy, passed = busy_seconds - self._busy_seconds, now - self._asked
        self._busy_seconds, self._asked = busy_seconds, now
        return min(busy / passed, 1.0) if passed > 0 else 0.0


class DrafterService:
    """The service: one object for all streams; the sessions themselves live in the proposer."""

    def __init__(
        self,
        info: WorkerInfo,
        tokenizer: TokenizerFiles,
        tls: Credentials | None = None,
        tracer: Otlp | None = None,
    ) -> None:
        """`tls`: for the connections to verifiers. `tracer` ends with the service."""
        self._info = info
        self._tls = tls
        self._tokenizer = tokenizer
        self._proposer: Proposer | None = None
        # By session: who opened it, and which Open it was.
        self._owners: dict[bytes, tuple[RouterPeer, int]] = {}
        self._links: dict[str, VerifierLink] = {}  # by verifier address
        self._link_of: dict[bytes, VerifierLink] = {}  # by session
        self._busy = BusyShare()
        self._reaching: asyncio.Task[str] | None = None  # the last verifier that was to be reached
        self._spans = DraftSpans(tracer, info.model.name)

    def use(self, proposer: Proposer) -> None:
        self._proposer = proposer

    @property
    def proposer(self) -> Proposer:
        assert self._proposer is not None, "the service serves only after use()"
        return self._proposer

    # -- what outrider.worker.worker asks --

    async def run(self) -> None:
        await watched(self.proposer.run(), self._watch())

    async def _watch(self) -> NoReturn:
        watch = StepWatch(HEARTBEAT_SECONDS)
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if watch.tick(self.proposer.under_way) is not Pulse.WELL:
                raise StepHung("a step of the draft model does not end; this process can only be replaced")

    def load(self) -> DrafterLoad:
        return self.proposer.load

    def stats(self) -> dict[str, float]:
        load = self.proposer.load
        return {
            "sessions": load.sessions,
            "busy": self._busy.since_last(self.proposer.busy_seconds),
            "kv_usage": load.kv_usage,
            "token_seconds": load.token_seconds,
            "rejections": load.rejections,
            "rejections_covered": load.rejections_covered,
        }

    async def probe(self) -> None:
        await self.proposer.probe()

    def drain(self) -> None:
        """Does nothing: a drafter just leaves, and its sessions go on plainly, or with another."""

    async def until_idle(self) -> None:
        return

    def give_back(self) -> None:
        """Does nothing: nothing is lost with a drafter."""

    async def close_gracefully(self) -> None:
        return

    # -- routers and their streams --

    def add_to(self, server: grpc.aio.Server, called: bool = True) -> None:
        """`called`: routers may open their streams there."""
        if called:
            add_methods(server, {DRAFTER_SESSIONS: self.sessions})
        add_description(server, self._info, self._tokenizer, lambda: True)  # one that is not well has ended

    async def sessions(
        self, messages: AsyncIterator[DrafterCommand], context: Any
    ) -> AsyncIterator[DrafterEvents]:
        _, commands = await read_hello(messages, Role.ROUTER)
        peer = RouterPeer()
        reader = asyncio.create_task(self._obey(peer, commands))
        try:
            yield DrafterEvents(hello=self._info.identity.hello())
            busy, beats = BusyShare(self.proposer.busy_seconds), 0
            told: DrafterLoad | None = None
            trips: dict[str, float] = {}  # as they were told
            while not peer.over:
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await peer.wake.wait()
                except TimeoutError:
                    pass
                peer.wake.clear()
                ended, peer.ended = peer.ended[:MOST_ENDED], peer.ended[MOST_ENDED:]
                if peer.ended:
                    peer.wake.set()
                found = self._round_trips()
                changed = {key: seconds for key, seconds in found.items() if is_news(seconds, trips.get(key))}
                load = replace(
                    self.proposer.load,
                    round_trip_seconds=min(found.values(), default=0.0),
                    round_trips=changed,
                )
                beats += 1
                reached, peer.reached = peer.reached, None
                due = ended or reached is not None or peer.sessions or beats >= IDLE_HEARTBEATS
                if not (due or told is None or load.is_news(told)):
                    continue
                beats, told, trips = 0, load, {key: trips.get(key, found[key]) for key in found} | changed
                load = replace(load, busy=busy.since_last(self.proposer.busy_seconds))
                yield DrafterEvents(load=load, ended=ended, reached=reached)
                await asyncio.sleep(PAUSE_SECONDS)
            await reader  # raises what ended it
        finally:
            reader.cancel()
            for session_id in [key for key, (owner, _) in self._owners.items() if owner is peer]:
                self._close(session_id)

    def _round_trips(self) -> dict[str, float]:
        return {
            address: link.round_trip_seconds
            for address, link in self._links.items()
            if link.round_trip_seconds
        }

    async def _obey(self, peer: RouterPeer, commands: AsyncIterator[DrafterCommand]) -> None:
        try:
            async for command in one_by_one(commands):
                match command.command:
                    case OpenDraft() as asked:
                        self._open(peer, asked)
                    case SetWindow(session_id, opening, window) if self._owns(peer, session_id, opening):
                        self.proposer.set_window(session_id, window)
                    case CloseDraft(session_id, opening) if self._owns(peer, session_id, opening):
                        self._close(session_id)
                    case ReachVerifier(address) if self._reaching is None or self._reaching.done():
                        self._reaching = asyncio.create_task(self._reach(peer, address))
        finally:
            peer.over = True
            peer.wake.set()

    async def _reach(self, peer: RouterPeer, address: str) -> str:
        """Tells the router whether a verifier is reached; returns the same."""
        why = "that is no host:port"
        if is_address(address):
            why = await why_unreachable(address, self._tls, REACHING_SECONDS)
        peer.reached = why and f"the drafter does not reach the verifier at {address}: {why}"
        peer.wake.set()
        return why and f"no draft of it reaches the verifier at {address}: {why}"

    async def trouble(self) -> str:
        """Returns why nothing that it drafts is of use, as far as that is known; empty = it is not known."""
        return await asyncio.shield(self._reaching) if self._reaching is not None else ""

    def _owns(self, peer: RouterPeer, session_id: bytes, opening: int) -> bool:
        """Returns True if it is so that the session was opened last; another router may have it since."""
        return self._owners.get(session_id) == (peer, opening)

    def _open(self, peer: RouterPeer, asked: OpenDraft) -> None:
        spec = DraftSpec(
            session_id=asked.session_id,
            params=asked.params,
            output=asked.output,
            draft_key=asked.draft_key,
            target_vocab_size=asked.target_vocab_size,
            target=asked.target,
            trace=asked.trace,
        )
        reason = self._unfit(spec)
        if reason is None and not is_address(asked.verifier_address):
            reason = "verifier_address must be a host:port"
        if reason is not None:
            peer.end(spec.session_id, asked.opening, DraftEndCause.UNFIT, reason)
            return
        self._close(spec.session_id)
        session = DraftSession(spec, asked.window)
        self.proposer.open(session)
        self._owners[spec.session_id] = peer, asked.opening
        peer.sessions += 1
        link = self._links.get(asked.verifier_address)
        if link is None:
            link = self._links[asked.verifier_address] = VerifierLink(
                asked.verifier_address,
                self._info.identity,
                self.proposer.commit,
                self._give_up,
                partial(self._links.pop, asked.verifier_address, None),
                time.monotonic,
                self._tls,
            )
        self._link_of[spec.session_id] = link
        self._spans.begin(session, asked.verifier_address)
        link.add(session)

    def _unfit(self, spec: DraftSpec) -> str | None:
        """Returns a sentence that says why this drafter cannot draft for the session, or None."""
        model = self._info.model
        if len(spec.session_id) != SESSION_ID_BYTES:
            return f"session_id must be {SESSION_ID_BYTES} bytes, not {len(spec.session_id)}"
        if not spec.target_vocab_size:
            return "target_vocab_size must be at least 1"  # else it would end the whole batch
        if not spec.params.prompt:
            return "prompt must hold at least one token"
        if not len(spec.output) < spec.params.max_tokens:  # its log would outgrow what is checked below
            return f"max_tokens must be more than the {len(spec.output)} tokens of output so far"
        total = spec.params.most_tokens
        if total > model.max_context:
            return f"prompt and max_tokens need {total} tokens; the draft's context has {model.max_context}"
        slots = self._info.kv_blocks * self._info.kv_block_size
        if total > slots:
            return f"prompt and max_tokens need {total} tokens; the drafter's KV pool holds {slots}"
        if any(token >= model.vocab_size for token in (*spec.params.prompt, *spec.output)):
            return f"the draft model has no token ids above {model.vocab_size - 1}"
        try:
            spec.params.sampling.validate(model.vocab_size)
        except OutriderError as error:
            return error.message
        return None

    def _close(self, session_id: bytes) -> None:
        owner, _ = self._owners.pop(session_id, (None, 0))
        if owner is not None:
            owner.sessions -= 1
        self.proposer.close(session_id)
        link = self._link_of.pop(session_id, None)
        if link is not None:
            link.remove(session_id)
        self._spans.over(session_id)

    def _give_up(self, session_id: bytes, cause: DraftEndCause, reason: str) -> None:
        """Stops drafting for a session by ourselves; its router is told."""
        peer, opening = self._owners.get(session_id, (None, 0))
        self._spans.given_up(session_id, reason)
        self._close(session_id)
        if peer is not None:
            peer.end(session_id, opening, cause, reason)

    # -- results --

    def on_change(self, changed: Sequence[DraftSession]) -> None:
        for session in changed:
            link = self._link_of.get(session.id)
            if link is not None:
                link.changed(session)

    def on_failed(self, session: DraftSession, reason: str) -> None:
        self._give_up(session.id, DraftEndCause.FAILED, reason)

    async def close(self) -> None:
        if self._reaching is not None:
            await cancel([self._reaching])
        for link in list(self._links.values()):
            await link.close()
        self._spans.close()


async def source(config: DrafterConfig, start_followers: StartFollowers | None = None) -> Source:
    """Returns the kind of draft that the configuration asks for, loaded. Raises StartupError.

    A draft model needs torch, which other kinds do not load."""
    if config.propose is not None:
        from drafter.suffix import suffix_source

        return suffix_source(config.remembered_bytes)
    from drafter.draft_model import model_source

    return await model_source(config, start_followers)


async def start(
    config: DrafterConfig, registrar: Registrar | None = None, start_followers: StartFollowers | None = None
) -> Worker:
    """Returns a drafter that is ready to guess and listens, but is known to nobody: it registers with
    `registrar`, or joins where the configuration says.

    `start_followers` starts the processes that a draft model is divided among. Raises StartupError."""
    server, tls = new_server(ping_seconds=WORKER_PING_SECONDS), opened(config.protection.tls)
    address = bind(server, config.listen.host, config.listen.port, tls=tls)
    credentials: Credentials | None = tls
    if registrar is not None:
        await check_admitted(registrar)
    else:
        token_of(config.joining)
        encrypted = any(url.encrypted for url in config.joining.urls)
        credentials = Trust(config.joining.join_ca) if encrypted else None
    found = await source(config, start_followers)
    tracer = tracer_of(config.export, found.info.identity)
    service = DrafterService(found.info, found.tokenizer, credentials, tracer)
    service.use(found.proposer(service.on_change, service.on_failed))
    service.add_to(server, called=registrar is not None)
    membership = Joined(config.joining, service, credentials) if registrar is None else Registered(registrar)
    port = int(address.rpartition(":")[2])
    own = config.listen.advertised_address(port)
    return Worker(found.info, own, service, server, membership, note=found.note, trouble=service.trouble)


async def serve(config: DrafterConfig) -> None:
    """Runs a drafter as a process of its own, until a signal. Raises StartupError or PeerRefused."""
    where, registrar = config.registration, None
    if config.joining.join is None:
        registrar = registrar_at(where.router, where.store, opened(config.protection.tls))
    await serve_until_stopped(await start(config, registrar))
