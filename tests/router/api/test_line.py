"""Where requests wait to be begun."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import Overloaded
from router.api.line import A_TURN, Line


async def come(line: Line, owner: str, begun: list[str]) -> None:
    await line.turn(owner)
    begun.append(owner)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_few_begin_in_a_turn_of_the_loop() -> None:
    line, begun = Line(), list[str]()
    tasks = [asyncio.create_task(come(line, "", begun)) for _ in range(10 * A_TURN)]
    counts = []
    while not all(task.done() for task in tasks):
        await turns(1)
        counts.append(len(begun))
    assert begun == [""] * 10 * A_TURN
    assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) <= A_TURN
    assert len(counts) < 15, "and no turn goes by without"


async def test_owners_have_turns() -> None:
    line, begun = Line(), list[str]()
    tasks = [asyncio.create_task(come(line, "alice", begun)) for _ in range(100)]
    await turns(2)
    tasks += [asyncio.create_task(come(line, "bob", begun)) for _ in range(2)]
    await asyncio.gather(*tasks)
    assert begun.count("bob") == 2
    assert begun[5 * A_TURN :].count("bob") == 0, "they do not wait for a hundred"


async def test_who_gives_up_leaves_its_place() -> None:
    line, begun = Line(places=4), list[str]()
    tasks = [asyncio.create_task(come(line, "", begun)) for _ in range(A_TURN + 4)]
    late = asyncio.create_task(come(line, "", begun))
    await turns(1)
    with pytest.raises(Overloaded, match="too many requests wait to be begun"):
        await late
    for task in tasks[A_TURN:]:
        task.cancel()
    await asyncio.wait(tasks)
    assert begun == [""] * A_TURN
    await asyncio.gather(*(come(line, "", begun) for _ in range(A_TURN + 4)))
    assert begun == [""] * (2 * A_TURN + 4)


async def test_one_key_has_half_of_the_places() -> None:
    line, begun = Line(places=4), list[str]()
    tasks = [asyncio.create_task(come(line, "alice", begun)) for _ in range(A_TURN + 3)]
    tasks += [asyncio.create_task(come(line, "bob", begun)) for _ in range(2)]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, Overloaded) for each in done] == [False] * (A_TURN + 2) + [True, False, False]
