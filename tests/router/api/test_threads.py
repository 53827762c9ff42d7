"""The threads that read requests: how many wait there, and who waits for whom."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from outrider.errors import InvalidRequest, Overloaded
from router.api import threads as threads_module
from router.api.threads import SMALL_BYTES, THREADS, Threads, beside
from tests.router.api.scripted import until

LARGE = SMALL_BYTES + 1


async def test_large_requests_have_so_many_places_and_small_ones_do_not_wait_for_them() -> None:
    threads, go_on = Threads(large_places=THREADS + 2), threading.Event()
    waiting = [asyncio.create_task(threads.run(LARGE, "", None, go_on.wait)) for _ in range(THREADS + 2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many large requests"):
        await threads.run(LARGE, "", None, int)
    assert await threads.run(SMALL_BYTES, "", None, int, "7") == 7
    waiting.pop().cancel()  # one that has not begun gives its place back at once
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="in the time that its client waits"):
        await threads.run(LARGE, "", asyncio.get_running_loop().time(), int)
    go_on.set()
    assert await asyncio.gather(*waiting[:-1]) == [True] * THREADS
    assert await threads.run(LARGE, "", None, int, "8") == 8


async def test_long_answers_have_few_threads_and_owners_have_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They had as many as the machine has cores, and each took as much of the interpreter as the loop has."""
    go_on, begun = threading.Event(), list[str]()

    def work(owner: str) -> None:
        begun.append(owner)
        go_on.wait()

    told = []
    for owner in (*["alice"] * 9, "bob"):
        monkeypatch.setattr(threads_module, "this_owner", lambda owner=owner: owner)
        told.append(asyncio.create_task(beside(work, owner)))
        await asyncio.sleep(0)
        await until(lambda: len(begun) >= min(len(told), THREADS))
    told.pop(0).cancel()  # what has begun goes on
    go_on.set()
    await asyncio.gather(*told)
    assert begun[:THREADS] == ["alice"] * THREADS and begun.index("bob") <= THREADS + 1
    assert len(threads_module._LONG._threads._threads) <= THREADS


async def test_one_key_has_half_of_the_places() -> None:
    threads, go_on = Threads(large_places=4), threading.Event()
    waiting = [asyncio.create_task(threads.run(LARGE, "alice", None, go_on.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await threads.run(LARGE, "alice", None, int)
    waiting.append(asyncio.create_task(threads.run(LARGE, "bob", None, go_on.wait)))
    go_on.set()
    assert await asyncio.gather(*waiting) == [True] * 3


async def test_what_the_work_raises_comes_back_and_its_place_with_it() -> None:
    threads = Threads(small_places=1)
    for _ in range(3):
        with pytest.raises(ValueError):
            await threads.run(1, "", None, int, "x")


async def test_what_is_refused_is_freed_in_the_thread_that_read_it() -> None:
    freed_in: list[str] = []

    class Read:
        def __del__(self) -> None:
            freed_in.append(threading.current_thread().name)

    def refuse() -> None:
        read = Read()
        raise InvalidRequest(f"it is none: {type(read).__name__}")

    with pytest.raises(InvalidRequest, match="it is none: Read") as refused:
        await Threads().run(1, "", None, refuse)
    assert refused.value.__context__ is None
    assert len(freed_in) == 1 and freed_in[0].startswith("small requests")


async def test_a_key_with_little_to_do_does_not_wait_for_one_with_much() -> None:
    threads, go_on, done = Threads(large_places=16), threading.Event(), list[str]()
    busy = [asyncio.create_task(threads.run(LARGE, "alice", None, go_on.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)
    others = [
        asyncio.create_task(threads.run(LARGE, owner, None, done.append, owner))
        for owner in ("alice", "alice", "alice", "bob", "bob", "carol")
    ]
    others[1].cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*busy, *others, return_exceptions=True)
    # Two threads may swap neighbours.
    assert sorted(done[:3]) == ["alice", "bob", "carol"] and sorted(done[3:]) == ["alice", "bob"]


async def test_work_that_is_given_up_before_its_turn_is_let_go_at_once() -> None:
    threads, go_on = Threads(large_places=THREADS + 1), threading.Event()
    busy = [asyncio.create_task(threads.run(LARGE, "", None, go_on.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)

    class Body:
        """What a client sent."""

    held = weakref.WeakSet[Body]()
    for _ in range(10):  # its client waits no longer, and sends another
        body = Body()
        held.add(body)
        with pytest.raises(Overloaded, match="in the time that its client waits"):
            await threads.run(LARGE, "", asyncio.get_running_loop().time(), str, body)
        del body
    assert len(held) <= 1  # the last one's error may be about
    go_on.set()
    await asyncio.gather(*busy)
    assert await threads.run(LARGE, "", None, int, "8") == 8


async def test_answers_that_are_told_again_have_turns_too() -> None:
    """Of their owners, and the logs that are decoded for them."""
    threads, go_on, done = Threads(), threading.Event(), list[str]()
    with threads.retelling("alice") as many, threads.retelling("bob") as one:
        first = asyncio.create_task(many.run(go_on.wait))
        rest = [asyncio.create_task(many.run(done.append, "alice")) for _ in range(5)]
        await asyncio.sleep(0)
        rest.append(asyncio.create_task(one.run(done.append, "bob")))
        await asyncio.sleep(0)
        log = asyncio.get_running_loop().run_in_executor(threads.of_logs, done.append, "log of no owner")
        go_on.set()
        await asyncio.gather(first, log, *rest)
    assert done[:3] == ["alice", "bob", "log of no owner"] and done[3:] == ["alice"] * 4
