"""Streams that are closed and resumed while what was said of them is still on its way, in virtual time.

A router and a verifier of the simulated world, with a line between them that holds every message back.
Clients read, leave in the midst of their answer and come back, again and again: each answer has to be the
target's own, and no error may come.

    python -m tests.protocol.resumptions 10000
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass, field

from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionId, SessionParams
from router.requests import GenerationRequest
from tests.protocol.world import Client, Wire, World, idle, reference

STEP_SECONDS = 0.005
MOST_DELAY_SECONDS = 0.2  # one way
CLIENTS = 8
TOKENS = 200
PROMPT = (1, 2, 3)


@dataclass
class Line:
    """What is on its way between a router and a verifier, in order."""

    wire: Wire
    delay: float  # seconds, one way
    commands: deque[float] = field(default_factory=deque)  # arrivals
    events: deque[float] = field(default_factory=deque)

    async def carry(self, now: float) -> None:
        for sent, arrivals, deliver in (
            (self.wire.commands, self.commands, self.wire.deliver_command),
            (self.wire.events, self.events, self.wire.deliver_events),
        ):
            arrivals.extend([now + self.delay] * (len(sent) - len(arrivals)))
            while arrivals and arrivals[0] <= now:
                arrivals.popleft()
                deliver()
                await idle()


async def play(resumptions: int, seed: int) -> Counter[str]:
    """Returns how many times clients came back, and what errors they had, by their sentence."""
    rng = random.Random(seed)
    world = World()
    router, node = world.routers[0], world.verifiers[0]
    await router.lose(world.verifiers[1])
    line = Line(router.wires[node.name], rng.uniform(0, MOST_DELAY_SECONDS))
    expected = reference(PROMPT, TOKENS)
    clients: list[Client] = []
    at: dict[int, float] = {}  # when a client leaves or comes back
    found: Counter[str] = Counter()
    number = 0

    def request() -> GenerationRequest:
        nonlocal number
        number += 1
        params = SessionParams(PROMPT, SamplingParams(temperature=0.0), TOKENS)
        return GenerationRequest("m", params, None, SessionId(number.to_bytes(16)))

    for index in range(CLIENTS):
        clients.append(Client(request()))
        clients[index].begin(router)
        at[index] = rng.uniform(0, 1.0)
    while found["resumptions"] < resumptions:
        world.now += STEP_SECONDS
        await line.carry(world.now)
        node.step()
        await idle()
        await router.write()
        for index, client in enumerate(clients):
            if client.error is not None:
                found[client.error.message] += 1
            if client.error is not None or client.ended:
                assert client.error is not None or client.tokens == expected
                clients[index] = client = Client(request())
                client.begin(router)
                at[index] = world.now + rng.uniform(0, 1.0)
            elif world.now >= at[index] and client.reading:
                await client.leave()
                line.delay = rng.uniform(0, MOST_DELAY_SECONDS)
                at[index] = world.now + rng.uniform(0, 2 * line.delay)
            elif world.now >= at[index]:
                client.resume(router)
                found["resumptions"] += 1
                at[index] = world.now + rng.uniform(0, 2 * MOST_DELAY_SECONDS)
    for client in clients:
        await client.leave()
    return found


if __name__ == "__main__":
    print(dict(asyncio.run(play(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))))
