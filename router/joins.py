"""Drafters that nobody can call: they open the stream by themselves, and show a token.

A token is good for this and nothing else: who bears it can draft, as an untrusted peer, for as long as its
line is in the file. What it says is bounded as any drafter's is; the bearer of one that was cut off waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc.aio

from outrider.errors import (
    IdInUse,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PeerRefused,
    Unauthenticated,
    Unavailable,
)
from outrider.net.allowance import CUT_OFF_SECONDS, Allowance, CutOff
from outrider.net.rpc import add_methods
from outrider.net.tasks import cancel, first_of
from outrider.wire.description import WorkerInfo
from outrider.wire.drafter_sessions import DrafterCommand
from outrider.wire.methods import JOIN
from router.api.keys import ApiKey, Keys, find
from router.compatibility import Registration
from router.fleet import Fleet
from router.joined_stream import JoinedStream
from router.registration_limits import RegistrationLimits
from router.worker_discovery import WorkerDiscovery
from router.workers import Drafter

log = logging.getLogger(__name__)

MOST_DRAFTERS = 64  # of one token at a time, unless its line says another number
# That all drafters of one token may say a second, and at once: a message is 256 and its bytes (Allowance).
TOKEN_BYTES = 2**19, 2**23
LOOK_SECONDS = 1.0  # between two looks at whether a token is in force


class _Place(NamedTuple):
    """A drafter that is joined."""

    token: str  # name of the one that it showed
    holding: asyncio.Task[None]


class Joins:
    def __init__(
        self,
        tokens: Keys,
        discovery: WorkerDiscovery,
        fleet: Fleet,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives seconds."""
        self._tokens = tokens
        self._discovery = discovery
        self._fleet = fleet
        self._clock = clock
        self._limits = RegistrationLimits()
        self._joined: dict[str, _Place] = {}  # by worker_id
        self._said: dict[str, Allowance] = {}  # by token: as many as its file has had
        self._cut_off: dict[str, float] = {}  # until when, by token

    def add_to(self, server: grpc.aio.Server) -> None:
        add_methods(server, {JOIN: self.join}, decoded=False)

    async def join(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[DrafterCommand]:
        with self._told():
            token = self._shown(context)
            info = await self._described(token, messages)
            await self._make_place(token, info)
        stream = JoinedStream(messages, self._allowance(token))
        drafter = Drafter(Registration(info, "", None), stream, None)
        holding = asyncio.create_task(self._hold(drafter, token))
        holding.add_done_callback(lambda _: drafter.hang_up())
        worker_id = info.identity.worker_id
        place = self._joined[worker_id] = _Place(token.name, holding)
        try:
            async for command in stream.commands:
                yield command
            await asyncio.wait([holding])
            if holding.cancelled():  # gRPC would leave its stream open
                raise Unavailable("this drafter has come anew, by another stream")
            holding.result()
        finally:
            await cancel([holding])
            if self._joined.get(worker_id) is place:
                del self._joined[worker_id]

    def _allowance(self, token: ApiKey) -> Allowance:
        return self._said.setdefault(token.name, Allowance("drafter", *TOKEN_BYTES, self._clock))

    def _shown(self, context: Any) -> ApiKey:
        """Returns the token that the caller shows. Raises Unauthenticated, or Overloaded if it may not join
        now."""
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        scheme, _, text = str(shown).partition(" ")
        token = find(self._tokens(), text.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            raise Unauthenticated("the token is not known here: make one with `outrider keys add`")
        now = self._clock()
        wait = self._cut_off.get(token.name, 0.0) - now
        if wait > 0:
            raise Overloaded(f"the bearer of this token was cut off and is refused for another {wait:.0f} s")
        self._cut_off.pop(token.name, None)
        self._limits.word(token.name, 0, now)
        return token

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Counts refusals."""
        try:
            yield
        except OutriderError as error:
            refused = {Unauthenticated: "token", Overloaded: "too_many", IdInUse: "id_in_use"}
            if type(error) in refused:
                self._fleet.metrics.registration_refused(refused[type(error)])
            raise

    async def _described(self, token: ApiKey, messages: AsyncIterator[bytes]) -> WorkerInfo:
        raw = await anext(messages, None) or b""
        self._limits.word(token.name, len(raw), self._clock())  # before it is read, which takes 5 ms
        info = JOIN.asked.from_bytes(raw).info
        if info is None:
            raise InvalidRequest("a drafter that joins says first what it is", field="info")
        self._limits.left(token.name, info.identity.key)  # who comes again comes anew
        self._limits.worker(token.name, info.identity.key, hash(info), self._clock())
        verifiers = self._fleet.verifiers.values()
        if verifiers and not any(one.registration.join_address for one in verifiers):
            raise Unavailable(
                "no verifier of this service takes drafters that join: start one with --join-port"
            )
        return info

    async def _make_place(self, token: ApiKey, info: WorkerInfo) -> None:
        """Ends the former stream of a drafter that comes by another network. Raises IdInUse if somebody else
        has its id, Overloaded if too many have joined with the token."""
        worker_id = info.identity.worker_id
        while (former := self._joined.get(worker_id)) is not None:  # several may come while one ends
            if former.token != token.name:
                raise IdInUse(f"a drafter with the id {worker_id} is here already")
            await cancel([former.holding])
            if self._joined.get(worker_id) is former:
                del self._joined[worker_id]
        most = token.max_concurrent or MOST_DRAFTERS
        if sum(place.token == token.name for place in self._joined.values()) >= most:
            raise Overloaded(f"{most} drafters have joined with this token, the most at a time")

    async def _hold(self, drafter: Drafter, token: ApiKey) -> None:
        """Raises why it is over."""
        log.info("drafter %s joins with the token of %s", drafter.identity.worker_id, token.name)
        try:
            await first_of(self._until_gone(drafter), self._until_revoked(token))
        except CutOff as cut_off:
            log.warning("drafter %s, of %s: %s", drafter.identity.worker_id, token.name, cut_off.message)
            self._fleet.metrics.worker_cut_off("drafter")
            self._cut_off[token.name] = self._clock() + CUT_OFF_SECONDS
            raise
        except PeerRefused as refused:
            log.warning("drafter %s is refused: %s", drafter.identity.worker_id, refused.message)
            raise

    async def _until_gone(self, drafter: Drafter) -> None:
        why = await self._discovery.hold_joined(drafter)
        log.warning("drafter %s is given up: %s", drafter.identity.worker_id, why)
        raise Unavailable(f"the router has given this drafter up: {why}")

    async def _until_revoked(self, token: ApiKey) -> None:
        while any(each.digest == token.digest for each in self._tokens()):  # noqa: ASYNC110 (a file)
            await asyncio.sleep(LOOK_SECONDS)
        raise Unauthenticated("the token is not in force any more")
