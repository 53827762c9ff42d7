"""A session that is closed and resumed while what was said of it is still on its way."""

from __future__ import annotations

import asyncio

import pytest

from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionId, SessionParams
from router.requests import GenerationRequest
from tests.protocol.resumptions import play
from tests.protocol.world import Client, World, idle

PARAMS = SessionParams((1, 2, 3), SamplingParams(temperature=0.0), 50)


async def test_what_is_said_of_a_former_opening_is_not_for_the_one_after_it() -> None:
    world = World()
    router, node = world.routers[0], world.verifiers[0]
    await router.lose(world.verifiers[1])
    wire = router.wires[node.name]
    client = Client(GenerationRequest("m", PARAMS, None, SessionId(b"s" * 16)))
    client.begin(router)
    await idle()
    wire.deliver_command()
    await idle()
    await router.write()
    for _ in range(2):
        node.step()
        await idle()
    await client.leave()
    wire.deliver_events()  # for nobody
    client.resume(router)
    await idle()
    wire.deliver_events()  # of the former opening: it would leave a gap
    await idle()
    assert client.error is None
    while wire.commands:
        wire.deliver_command()
        await idle()
    node.step()
    await idle()
    while wire.events:
        wire.deliver_events()
        await idle()
    assert client.error is None and len(client.tokens) == 1
    await client.leave()


@pytest.mark.parametrize("seed", range(2))
def test_streams_are_closed_and_resumed_with_all_delays(seed: int) -> None:
    assert asyncio.run(play(100, seed)) == {"resumptions": 100}
