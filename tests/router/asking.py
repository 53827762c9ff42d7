"""A client of sessions, and what scripted workers say to it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from outrider.sampling.params import SamplingParams
from outrider.v1 import verifier_pb2
from outrider.wire.session import SessionParams
from router.requests import GenerationRequest, SessionBegun, SessionEvent

PROMPT = (5, 6, 7)
SAMPLING = SamplingParams(temperature=0.7, top_k=5, seed=2**64 - 1, logit_bias={4: 1.5})


def request(**changes: Any) -> GenerationRequest:
    """`changes`: fields of GenerationRequest or of its SessionParams."""
    asked: dict[str, Any] = {
        "prompt": PROMPT,
        "sampling": SAMPLING,
        "max_tokens": 50,
        "stop_token_ids": (0, 3),
    }
    params = SessionParams(**{name: changes.pop(name, asked[name]) for name in asked})
    return GenerationRequest(**{"model": "m", "params": params, **changes})


def committed(
    session_id: bytes, base: int, *tokens: int, accepted: int = 0, verified: int = 0, cached: int = 0
) -> dict[str, Any]:
    step = verifier_pb2.Committed(
        session_id=session_id,
        base=base,
        tokens=tokens,
        accepted=accepted,
        verified=verified,
        cached_prompt_tokens=cached,
    )
    return {"committed": [step]}


def finished(session_id: bytes, reason: int = verifier_pb2.FINISH_REASON_STOP) -> dict[str, Any]:
    return {"finished": [verifier_pb2.Finished(session_id=session_id, reason=reason)]}


async def first_step(events: AsyncGenerator[SessionEvent, None]) -> SessionEvent:
    """What comes after SessionBegun."""
    assert await anext(events) == SessionBegun()
    return await anext(events)


class Running:
    """A session that somebody iterates, as the API does: its steps and its end."""

    def __init__(self, rig: Any, wanted: GenerationRequest) -> None:
        self.events: list[Any] = []
        self.task = asyncio.create_task(self._run(rig, wanted))

    async def _run(self, rig: Any, wanted: GenerationRequest) -> list[Any]:
        return await self._read(rig.sessions.run(wanted))

    async def _read(self, events: AsyncGenerator[SessionEvent, None]) -> list[Any]:
        async for event in events:
            if isinstance(event, SessionBegun):
                self.events += event.known
            else:
                self.events.append(event)
        return self.events
