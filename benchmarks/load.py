"""Puts load on a service, and notes what became of each request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import count

from outrider.errors import OutriderError
from outrider_cli.bench.client import Refused, Request
from outrider_cli.bench.services import Service

OK, REFUSED, FAILED = 200, 429, 500


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request. Seconds are counted from the request on."""

    status: int
    began: float
    seconds: float  # to its end, or to the refusal
    first_token: float | None = None
    tokens: int = 0
    retry_after: str | None = None


async def ask(service: Service, prompt: str, max_tokens: int) -> Answer:
    """Asks for a greedy answer, read as fast as it comes."""
    began = time.perf_counter()
    try:
        reply = await service.ask(Request(prompt, max_tokens, 0.0, 0))
    except Refused as refusal:
        seconds = time.perf_counter() - began
        return Answer(refusal.status, began, seconds, retry_after=refusal.retry_after)
    except OutriderError:
        return Answer(FAILED, began, time.perf_counter() - began)
    first, _ = reply.arrivals[0]
    return Answer(OK, began, reply.ended - began, first - began, reply.tokens)


async def closed_loop(
    service: Service, prompts: list[str], max_tokens: int, concurrency: int, seconds: float
) -> list[Answer]:
    """Lets so many clients ask again as soon as they have their answers. Returns all answers that began in
    time."""
    answers: list[Answer] = []
    until = time.perf_counter() + seconds
    order = count()

    async def one() -> None:
        while time.perf_counter() < until:
            answers.append(await ask(service, prompts[next(order) % len(prompts)], max_tokens))

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return answers
