"""GET /v1/live: who may listen, how many, and that it ends with the router."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from outrider.errors import Overloaded
from router.api.live import MOST_LISTENERS, MOST_OF_ONE, Live


class Board:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def service(self) -> dict[str, Any]:
        self.asked.append("service")
        return {"n": len(self.asked)}

    def sessions_of(self, owner: str) -> list[dict[str, Any]]:
        self.asked.append(owner)
        return [{"owner": owner}]


async def test_each_is_told_its_own_sessions_and_all_the_same_service() -> None:
    board = Board()
    live = Live(board.service, board.sessions_of, period=3600)
    async with aclosing(live.events("alice")) as alice, aclosing(live.events("bob")) as bob:
        first, second = [json.loads((await anext(events)).data) for events in (alice, bob)]
    assert first["service"] == second["service"] == {"n": 1}
    assert (first["sessions"], second["sessions"]) == ([{"owner": "alice"}], [{"owner": "bob"}])
    async with aclosing(live.events("alice")) as alice:
        await anext(alice)
    assert board.asked == ["service", "alice", "bob", "alice"], "what is fresh is not made again"


async def test_a_period_later_all_is_told_anew() -> None:
    board = Board()
    live = Live(board.service, board.sessions_of, period=0.01)
    async with aclosing(live.events("")) as events:
        told = [json.loads((await anext(events)).data) for _ in range(3)]
    assert [one["service"]["n"] for one in told] == [1, 3, 5]


async def test_seconds_count_from_the_routers_start() -> None:
    times = iter([1000.0, 1002.5, 1002.5])
    live = Live(dict, lambda owner: [], period=3600, clock=lambda: next(times))
    async with aclosing(live.events("")) as events:
        assert json.loads((await anext(events)).data)["seconds"] == 2.5


async def test_listeners_are_counted_in_all_and_by_owner() -> None:
    live = Live(dict, lambda owner: [], period=3600)
    listening = []

    async def listen(owner: str) -> None:
        listening.append(live.events(owner))
        await anext(listening[-1])

    for _ in range(MOST_OF_ONE):
        await listen("alice")
    with pytest.raises(Overloaded):
        await listen("alice")
    for index in range(MOST_LISTENERS - MOST_OF_ONE):
        await listen(f"other {index}")
    with pytest.raises(Overloaded):
        await listen("bob")
    await listening[0].aclose()
    await listen("alice")
    for one in listening:
        await one.aclose()


async def test_who_has_no_key_to_show_may_fill_all_places() -> None:
    live = Live(dict, lambda owner: [], period=3600)
    listening = [live.events("") for _ in range(MOST_LISTENERS)]
    for one in listening:
        await anext(one)
    with pytest.raises(Overloaded):
        await anext(live.events(""))
    for one in listening:
        await one.aclose()


async def test_it_ends_with_the_router() -> None:
    live = Live(dict, lambda owner: [], period=3600)
    events = live.events("")
    await anext(events)
    rest = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)
    live.stop()
    assert await rest is None
