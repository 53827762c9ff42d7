"""What a flood of calls has taken is given back to the system, not kept for ever in pieces."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from itertools import pairwise

import pytest

from outrider.net import crowding
from outrider.net.freed_memory import GROWN, LITTLE, MOST_PAUSE, FreedMemory, give_back
from outrider.net.rpc import bind, new_server

PIECES, PIECE = 100_000, 2000
MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="another C library keeps what it has")
async def test_pieces_that_were_freed_are_given_back_by_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(crowding, "SETTLED_LOOKS", 2)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    give_back()  # what earlier tests freed: the pieces would fit in there, and nothing would grow
    server = new_server()
    port = int(bind(server, "127.0.0.1", 0).rpartition(":")[2])
    limiting = asyncio.create_task(crowding.limit_connections({port: 2048}))
    try:
        await asyncio.sleep(0.05)
        pieces = [libc.malloc(PIECE) for _ in range(PIECES)]
        for piece in pieces:
            ctypes.memset(piece, 1, PIECE)
        held = crowding._memory()
        for piece in pieces[:-1]:  # the last one keeps the rest where it is
            libc.free(piece)
        async with asyncio.timeout(60):
            while crowding._memory() > held - PIECES * PIECE * 0.8:  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0.02)
        libc.free(pieces[-1])
    finally:
        limiting.cancel()


def test_where_little_is_given_back_the_next_time_comes_later() -> None:
    memory = 100 * MIB
    freed = FreedMemory(lambda: memory)
    assert not freed.due()
    memory += GROWN
    assert not freed.due()
    memory += MIB
    times = list[int]()
    for look in range(4 * MOST_PAUSE):  # all of it is needed
        if freed.due():
            times.append(look)
            freed.given_back()
    pauses = [after - before for before, after in pairwise(times)]
    assert times[0] == 0
    assert pauses == [min(2 ** (one + 1), MOST_PAUSE) for one in range(len(pauses))]
    memory += GROWN + MIB  # a flood comes
    assert freed.due()
    memory -= LITTLE + MIB
    freed.given_back()
    assert freed.due()  # there may be more
    memory = 100 * MIB
    freed.given_back()
    assert not any(freed.due() for _ in range(2 * MOST_PAUSE))


def test_a_system_that_tells_no_memory_is_asked_for_nothing() -> None:
    freed = FreedMemory(lambda: 0)
    assert not any(freed.due() for _ in range(MOST_PAUSE))
    give_back()
