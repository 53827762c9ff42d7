"""The text for Prometheus over HTTP: long where there are many workers, and in nobody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
from prometheus_client import Metric

from outrider.wire.load import VerifierLoad
from router.metrics import LINES_AT_ONCE, Metrics
from tests.router.api.scripted import ScriptedRunner, byte_level, served


async def test_metrics_are_written_piece_by_piece_and_one_text_at_a_time(
    client_of: Callable[..., httpx.AsyncClient], metrics: Metrics
) -> None:
    at_once, most, turns = 0, 0, 0

    class Watched:
        def collect(self) -> Iterator[Metric]:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            yield Metric("watched", "", "gauge")
            at_once -= 1

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    metrics.registry.register(Watched())  # type: ignore[arg-type]
    for number in range(2000):
        metrics.observe_load(f"verifier {number}", "demo", VerifierLoad(running=number))
    pieces = list(metrics.pieces())
    assert max(piece.count(b"\n") for piece in pieces) <= LINES_AT_ONCE + 2
    most = 0
    client = client_of(ScriptedRunner(served(byte_level()), lambda request: []))
    turning = asyncio.create_task(turn())
    answers = await asyncio.gather(*(client.get("/metrics") for _ in range(3)))
    turning.cancel()
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert {answer.content for answer in answers} == {b"".join(pieces)}
    assert most == 1 and turns >= 3 * len(pieces)
