"""Tasks that belong together: run side by side, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Runs them side by side until the first ends, cancels the others, and raises what that one raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(tasks)


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels them, and returns when they have ended, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def heeded(awaited: Awaitable[T]) -> T:
    """Awaits it, and ends as cancelled where this task was cancelled meanwhile, whatever came of that inside.

    For libraries that lose a cancellation which comes in the moment in which what they wait for ends: gRPC
    where a call fails then, Redis's where it has written (before Python 3.12: python/cpython#86296). Who
    tries again and again would never end.
    """
    task = asyncio.current_task()
    assert task is not None, "only a task can be cancelled"
    before = task.cancelling()
    try:
        return await awaited
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
