"""What the leader of a tensor-parallel group does beside its part of a step: it tells the others of each one,
shows them that it is there, and notices when one of them is lost.

Any failure in a step is final, since the ranks are out of step after it: every step from then on raises
PeerLost.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

import torch

from outrider.engine.ranks import Ranks
from outrider.engine.step_message import Kind, Words, encode
from outrider.errors import OutriderError, PeerLost

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0  # between two signs of life from an idle leader


class Leading:
    """What the leader does from the moment at which the others follow."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._stepping = threading.Lock()  # a probe, or a sign of life, may come while a step runs
        self._lost: Future[None] = Future()  # raises what broke the group
        self._lost.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        self._closed = threading.Event()
        self._left = False
        self._beating = threading.Thread(target=self._beat, name="tensor-parallel", daemon=True)
        self._beating.start()

    @contextmanager
    def step(self, message: Words) -> Iterator[None]:
        """Tells the others of a step, to be run in here."""
        with self._stepping:
            if self._lost.done():
                self._lost.result()
            try:
                self._ranks.send(torch.from_numpy(message))
                yield
            except PeerLost as error:
                self._fail(self._ranks.explain(error))
            except Exception as error:
                log.exception("a step failed at the leader of a tensor-parallel group")
                self._fail(PeerLost(f"a step failed at the leader ({type(error).__name__})"))

    async def serve(self, steps: Coroutine[Any, Any, None]) -> None:
        """Runs a loop of steps until it, or the group, fails, and raises why; leaves the group then."""
        running, lost = asyncio.ensure_future(steps), asyncio.wrap_future(self._lost)
        try:
            await asyncio.wait([running, lost], return_when=asyncio.FIRST_COMPLETED)
            await (lost if lost.done() else running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            lost.cancel()
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Lets the others stop, once the step that runs is over."""
        if self._left:
            return
        self._left = True
        self._closed.set()
        self._beating.join()
        with suppress(OutriderError), self.step(encode(Kind.STOP)):  # a probe may come after it
            self._lost.set_exception(PeerLost("the tensor-parallel group has been left"))
        self._ranks.close()

    def _fail(self, error: OutriderError) -> None:
        """Makes the failure known, and raises it."""
        with suppress(InvalidStateError):  # another thread has said it first
            self._lost.set_exception(error)
        raise error

    def _beat(self) -> None:
        """Notices a lost rank while nothing runs, and shows the others that the leader is there."""
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self._ranks.check()
                if not self._stepping.locked():
                    with self.step(encode(Kind.ANSWER)):
                        self._ranks.answer()
            except OutriderError as error:
                with suppress(OutriderError):
                    self._fail(error)
                return
