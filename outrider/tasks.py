"""Tasks that belong together: run side by side, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


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
