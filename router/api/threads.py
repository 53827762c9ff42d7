"""Where work is done that grows with what a client sent: a few threads, counted, beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter as Tally
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import count
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from outrider.errors import OutriderError, Overloaded
from router.api.access import owner as this_owner

P = ParamSpec("P")
T = TypeVar("T")

TINY_BYTES = 4096  # what takes less time than to hand it to a thread
SMALL_BYTES = 64 * 1024  # of a request that does not wait for large ones
THREADS = 2  # of each kind
SMALL_PLACES = 512  # requests that run and wait
LARGE_PLACES = 16
STRUCTURED_PLACES = 64
RETOLD_PLACES = 64  # answers that are read from their logs, up to where their clients are
RETOLD_TOKENS = 2**22  # of whole logs, until answers that are over are told: each takes up to 90 bytes
OWNERS_SHARE = 2  # one key's requests have at most one in so many of the places


class Threads:
    """Small requests, large ones and those with a grammar to compile have threads of their own, and each kind
    so many places. So have answers that are told again, but one thread: the event loop has the interpreter
    for as long as it does."""

    def __init__(
        self,
        small_places: int = SMALL_PLACES,
        large_places: int = LARGE_PLACES,
        retold_places: int = RETOLD_PLACES,
    ) -> None:
        self._small = _Lane("small requests", small_places)
        self._large = _Lane("large requests", large_places)
        self._structured = _Lane("requests with a grammar", STRUCTURED_PLACES)
        self._retold = _Lane("resumed answers", retold_places, threads=1)
        self._held: Tally[str] = Tally()  # tokens of the prompts of these, by owner

    @property
    def of_logs(self) -> Executor:
        """Returns the thread in which logs are decoded for those who have a place."""
        return _Turns(self._retold)

    def retelling(self, owner: str) -> Retelling:
        """Takes a place for an answer that is told again, before its log is read. Raises Overloaded."""
        return Retelling(self._retold, owner, self._held)

    async def run(
        self,
        size: int | None,
        owner: str,
        until: float | None,
        work: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Returns what the work returns, and raises what it raises.

        `size`: bytes of what the client sent; None = a grammar is to be compiled. `owner`: name of its key,
        or "". `until`: on the loop's clock, how long the client waits, or None. Raises Overloaded if no place
        is free or the time is over."""
        asked = copy_context()  # in which `work` knows whose the request is
        future = self._lane(size).submit(owner, lambda: asked.run(work, *args, **kwargs))
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise Overloaded(
                "the request was not read in the time that its client waits; try again later"
            ) from None

    def _lane(self, size: int | None) -> _Lane:
        if size is None:
            return self._structured
        return self._small if size <= SMALL_BYTES else self._large


class Retelling:
    """A place, until `leave`, and tokens that are held, until `release`. The work is done in the thread, in
    its owner's turn."""

    def __init__(self, lane: _Lane, owner: str, held: Tally[str]) -> None:
        """`held`: of all of them, by owner."""
        self._lane = lane
        self._owner = owner
        self._left = False
        self._held = held
        self.tokens = 0  # that it holds
        lane.enter(owner)

    def hold(self, tokens: int) -> None:
        """Takes so many more tokens into memory. Raises Overloaded, but to whose owner nobody else does."""
        most = RETOLD_TOKENS // OWNERS_SHARE if self._owner else RETOLD_TOKENS
        others = self._held[self._owner] - self.tokens
        if others and (
            self._held[self._owner] + tokens > most or self._held.total() + tokens > RETOLD_TOKENS
        ):
            raise Overloaded("too many long answers are being told again; try again shortly")
        self._held[self._owner] += tokens
        self.tokens += tokens

    def release(self) -> None:
        self._held[self._owner] -= self.tokens
        self.tokens = 0
        if not self._held[self._owner]:
            del self._held[self._owner]

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what the work returns, and raises what it raises."""
        return await asyncio.wrap_future(self._lane.queue(self._owner, partial(work, *args, **kwargs)))

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._lane.leave(self._owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        self.release()


class _Lane:
    def __init__(self, name: str, places: int, threads: int = THREADS) -> None:
        self._name = name
        self._places = places
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._taken: Tally[str] = Tally()  # by owner
        self._waiting: dict[str, dict[int, Callable[[], None]]] = {}  # by owner, whose turn is next first
        self._numbers = count()
        self._lock = threading.Lock()

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """Takes a place for the work. Raises Overloaded."""
        self.enter(owner)
        future = self.queue(owner, work)
        future.add_done_callback(lambda _: self.leave(owner))
        return future

    def queue(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """For who has a place. Owners have turns: who has much to do waits for itself."""
        future: Future[T] = Future()
        number = next(self._numbers)
        with self._lock:
            self._waiting.setdefault(owner, {})[number] = lambda: _do(future, work)
        future.add_done_callback(lambda _: self._over(owner, number))
        self._threads.submit(self._do_next)
        return future

    def _over(self, owner: str, number: int) -> None:
        """Work that is given up before its turn is let go at once, with all that it holds: who has a place
        may wait long, who gave it up takes another."""
        with self._lock:
            waiting = self._waiting.get(owner, {})
            if waiting.pop(number, None) is not None and not waiting:
                del self._waiting[owner]

    def _do_next(self) -> None:
        with self._lock:
            owner = next(iter(self._waiting), None)
            if owner is None:  # its work was given up
                return
            waiting = self._waiting.pop(owner)
            work = waiting.pop(next(iter(waiting)))
            if waiting:
                self._waiting[owner] = waiting  # behind the others
        work()

    def enter(self, owner: str) -> None:
        """Raises Overloaded if no place is free."""
        with self._lock:
            most = max(self._places // OWNERS_SHARE, 1) if owner else self._places
            if self._taken.total() >= self._places or self._taken[owner] >= most:
                raise Overloaded(f"too many {self._name} wait to be read; try again shortly")
            self._taken[owner] += 1

    def leave(self, owner: str) -> None:
        with self._lock:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]


_LONG = _Lane("long answers", places=0)  # of all routers of a process; who has answers has a place elsewhere


async def beside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what the work returns, which tells a long answer, and raises what it raises. Owners have turns,
    and threads are few: all that want the interpreter get as much of it as the event loop."""
    asked = copy_context()
    return await asyncio.wrap_future(_LONG.queue(this_owner(), lambda: asked.run(work, *args, **kwargs)))


class _Turns(Executor):
    """A lane's threads, in the turn of the owner whose request is answered."""

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._lane.queue(this_owner(), partial(fn, *args, **kwargs))


def _lightly(work: Callable[[], T]) -> T:
    """Does the work. Its refusal leaves the thread without the frames that it came through: they hold what
    was read, which would be freed where the refusal is answered, on the loop."""
    try:
        return work()
    except OutriderError as refusal:
        refusal.__context__ = None  # which holds the values that were at fault
        raise refusal.with_traceback(None) from None


def _do(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        done = _lightly(work)
    except BaseException as error:
        future.set_exception(error)
        del future, work  # this frame is the error's, which would hold itself
    else:
        future.set_result(done)
