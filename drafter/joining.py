"""A drafter that nobody can call, because it is behind NAT or moves about.

It opens its stream to each router by itself, shows a token, and opens it anew whenever it ends. What they say
there is what they say on a stream that a router opens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from outrider.errors import OutriderError, PeerRefused, StartupError
from outrider.net.backoff import Backoff
from outrider.net.conversation import converse
from outrider.net.diagnosis import why_unreachable
from outrider.net.rpc import channel
from outrider.net.tasks import cancel, propagate_cancel
from outrider.net.tls import Credentials
from outrider.net.watched import reason
from outrider.options.worker import Joining, JoinUrl, is_token
from outrider.store.store import WorkerRecord
from outrider.wire.description import WorkerInfo
from outrider.wire.drafter_sessions import DrafterCommand, DrafterEvents
from outrider.wire.methods import JOIN
from outrider.worker.registration import OnState

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
LAST_BACKOFF_SECONDS = 5.0
GOOD_SECONDS = 10.0  # for which it must have been joined, for the pauses to begin anew
FATAL = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION}  # trying again is of no use


class Drafts(Protocol):
    """Who drafts for the sessions: the drafter's service."""

    def sessions(
        self, messages: AsyncIterator[DrafterCommand], context: Any
    ) -> AsyncIterator[DrafterEvents]: ...


class Joined:
    """A drafter's membership where it opens the streams."""

    def __init__(
        self,
        joining: Joining,
        service: Drafts,
        credentials: Credentials | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._joining = joining
        self._service = service
        self._credentials = credentials
        self._clock = clock
        self._in: dict[JoinUrl, None] = {}  # where it is joined now
        self._told: tuple[str | None, str] | None = None

    async def keep(self, describe: Callable[[], WorkerRecord], on_state: OnState | None) -> NoReturn:
        """Raises PeerRefused with a router's sentence if its token is not good, or it does not fit: once no
        other router is left that may take it."""
        info = describe().info
        tasks = [
            asyncio.create_task(self._keep_joined(url, info, on_state or (lambda *_: None)))
            for url in self._joining.urls
        ]
        left = len(tasks)
        try:
            for ended in asyncio.as_completed(tasks):
                left -= 1
                try:
                    await ended
                except PeerRefused as refused:
                    if not left:
                        raise
                    log.warning("%s; going on with the other routers of --join", refused.message)
            raise AssertionError("it is tried for ever")
        finally:
            await cancel(tasks)

    async def close(self) -> None:
        """Does nothing: it has left with the end of `keep`."""

    async def _keep_joined(self, url: JoinUrl, info: WorkerInfo, on_state: OnState) -> NoReturn:
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, GOOD_SECONDS)
        while True:
            began, fatal = self._clock(), False
            try:
                code, details = await propagate_cancel(self._join(url, info, on_state))
                why, fatal = details, code in FATAL
                if code is grpc.StatusCode.UNIMPLEMENTED:
                    why = "that router takes no drafters that join: start it with --drafter-tokens"
                if code is grpc.StatusCode.UNAVAILABLE:
                    why = await why_unreachable(url.address, self._credentials) or details
            except OutriderError as error:
                why = error.message
            except Exception:
                log.exception("the stream to the router at %s failed", url.address)
                why = "this drafter failed"
            self._in.pop(url, None)
            if not self._in:
                self._tell(on_state, None, f"{url.address}: {why or 'the stream ended'}")
            if fatal:
                raise PeerRefused(f"the router at {url.address} refuses this drafter: {why}")
            await asyncio.sleep(backoff.after(self._clock() - began))

    def _tell(self, on_state: OnState, router: str | None, why: str) -> None:
        if self._told != (router, why):
            self._told = router, why
            on_state(router, why)

    async def _join(self, url: JoinUrl, info: WorkerInfo, on_state: OnState) -> tuple[grpc.StatusCode, str]:
        """Returns how the stream ended."""
        async with channel(url.address, self._credentials, JOIN.answered.max_bytes) as connection:
            call = converse(connection, JOIN, token=token_of(self._joining))
            try:
                with suppress(grpc.aio.AioRpcError):
                    await call.write(DrafterEvents(info=info))
                    events: Any = self._service.sessions(call.heard(), None)
                    async with aclosing(events):
                        async for batch in events:
                            await call.write(batch)
                            if url not in self._in:  # the router has answered
                                self._in[url] = None
                                self._tell(on_state, url.address, "joined")
                end = await call.end()
                return end.code(), end.details() or ""
            finally:
                call.cancel()


def token_of(joining: Joining) -> str:
    """Returns the token, as its file has it now. Raises StartupError."""
    if joining.token_file is None:
        assert joining.token is not None, "it is checked at the start"
        return joining.token
    try:
        token = joining.token_file.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no text"
        raise StartupError(f"--token-file cannot be read: {why}") from None
    if not is_token(token):
        raise StartupError(f"--token-file {joining.token_file} holds no token: one of `outrider keys add`")
    return token
