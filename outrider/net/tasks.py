"""Tasks that belong together run side by side and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Runs the coroutines side by side until the first ends, cancels the others, and raises what the first
    raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(tasks)


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and returns when all have ended, whatever their end was."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def propagate_cancel(awaited: Awaitable[T]) -> T:
    """Awaits and returns the result. If this task was cancelled meanwhile, it ends as cancelled, whatever
    came of that inside.

    Some libraries lose a cancellation that comes at the moment at which their own wait ends: gRPC if a call
    fails just then, Redis's client if it has just written (before Python 3.12: python/cpython#86296). A loop
    that tries again and again would never end.
    """
    task = asyncio.current_task()
    assert task is not None, "only a task can be cancelled"
    before = task.cancelling()
    try:
        return await awaited
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
