"""A router's commands on their way to a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from outrider.net.commands import MOST_BULK, one_by_one, together
from outrider.net.outbox import Outbox
from outrider.sampling.params import SamplingParams
from outrider.wire.hello import Identity, Role
from outrider.wire.session import SessionParams
from outrider.wire.verifier_sessions import CloseSession, OpenSession, VerifierCommand

HELLO = VerifierCommand(hello=Identity(Role.ROUTER, "r", 1).hello())


def close(number: int) -> VerifierCommand:
    return VerifierCommand(command=CloseSession(bytes([number]) * 16, number))


def opened(tokens: int, **options: Any) -> VerifierCommand:
    biases = dict.fromkeys(range(options.pop("biases", 0)), 1.0)
    params = SessionParams((1,) * tokens, SamplingParams(logit_bias=biases), 4, **options)
    return VerifierCommand(command=OpenSession(b"o" * 16, params, (), 0, b"", 1))


async def written(commands: list[VerifierCommand]) -> list[VerifierCommand]:
    outbox: Outbox[VerifierCommand] = Outbox()
    for command in commands:
        outbox.put(command)
    outbox.close()
    return [message async for message in together(outbox)]


async def each_of(messages: list[VerifierCommand]) -> list[VerifierCommand]:
    async def read() -> AsyncIterator[VerifierCommand]:
        for message in messages:
            yield message

    return [command async for command in one_by_one(read())]


async def test_what_waits_is_one_message_and_is_obeyed_in_its_order() -> None:
    said = [close(number) for number in range(5)]
    messages = await written([HELLO, *said])
    assert [len(message.further) for message in messages] == [0, 4], "a hello is alone"
    assert messages[0] == HELLO
    assert [replace(each, further=()) for each in await each_of(messages[1:])] == said


async def test_a_message_has_a_bound() -> None:
    """What a long prompt has would come again and again up to what gRPC takes of a message."""
    large = opened(tokens=MOST_BULK // 4)
    messages = await written([close(1), large, large, close(2), close(3)])
    assert [1 + len(message.further) for message in messages] == [2, 1, 2]
    biases, ends = opened(1, biases=1024), opened(1, stop_token_ids=tuple(range(MOST_BULK // 4)))
    messages = await written([close(1), biases, biases, close(2), ends, ends])
    assert [1 + len(message.further) for message in messages] == [2, 1, 2, 1]
    messages = await written([close(number % 256) for number in range(1000)])
    assert [1 + len(message.further) for message in messages] == [256, 256, 256, 232]
