"""A verifier, and its streams spoken to by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from outrider.net.draft_right import right
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.wire.codec import sampling_to_wire
from outrider.wire.hello import PROTOCOL_VERSION, Identity, Role, hello_to_wire
from verifier.service import VerifierService
from verifier.stepper import Stepper

KEY = b"k" * 16
GREEDY = sampling_to_wire(SamplingParams(temperature=0.0))


@dataclass
class Running:
    service: VerifierService
    stepper: Stepper
    stub: verifier_pb2_grpc.VerifierStub
    identity: Identity
    connection: grpc.aio.Channel


@dataclass
class Talk:
    """A bidirectional call, one side written by hand."""

    call: Any
    outgoing: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    @classmethod
    def start(cls, method: Any) -> Talk:
        outgoing: asyncio.Queue[Any] = asyncio.Queue()

        async def messages() -> AsyncIterator[Any]:
            while (message := await outgoing.get()) is not None:
                yield message

        return cls(method(messages()), outgoing)

    def say(self, message: Any) -> None:
        self.outgoing.put_nowait(message)

    async def hear(self) -> Any:
        async with asyncio.timeout(120):
            message = await self.call.read()
        assert message is not grpc.aio.EOF, "the stream ended"
        return message


def hello(
    role: Role, tokenizer_hash: str = "", version: int = PROTOCOL_VERSION, worker_id: str = "peer"
) -> common_pb2.Hello:
    message = hello_to_wire(Identity(role, worker_id, 2, "", tokenizer_hash).hello())
    message.protocol_version = version
    return message


async def router(verifier: Running) -> Talk:
    talk = Talk.start(verifier.stub.Sessions)
    talk.say(verifier_pb2.VerifierCommand(hello=hello(Role.ROUTER)))
    assert (await talk.hear()).hello.worker_id == "v"
    return talk


async def drafter(verifier: Running, worker_id: str = "peer") -> Talk:
    talk = Talk.start(verifier.stub.Speculate)
    talk.say(greeting(verifier, worker_id))
    assert (await talk.hear()).hello.worker_id == "v"
    return talk


def greeting(verifier: Running, worker_id: str = "peer") -> verifier_pb2.DraftBatch:
    """A drafter's first message."""
    said = hello(Role.DRAFTER, verifier.identity.tokenizer_hash, worker_id=worker_id)
    return verifier_pb2.DraftBatch(hello=said)


def open_session(session_id: bytes, max_tokens: int = 4, **changed: Any) -> verifier_pb2.VerifierCommand:
    """`changed`: fields of OpenSession or of its SessionParams."""
    asked = {"prompt": [5, 6, 7], "sampling": GREEDY, "max_tokens": max_tokens, "stop_token_ids": []}
    params = common_pb2.SessionParams(**{name: changed.pop(name, asked[name]) for name in asked})
    fields = {"num_speculative_tokens": 4, "draft_key": KEY, **changed}
    return verifier_pb2.VerifierCommand(
        open=verifier_pb2.OpenSession(session_id=session_id, params=params, **fields)
    )


def attach(session_id: bytes, key: bytes = KEY, turn: int = 0, seat: int = 0) -> verifier_pb2.DraftBatch:
    shown = right(key, turn, seat)
    return verifier_pb2.DraftBatch(attach=[verifier_pb2.Attach(session_id=session_id, draft_key=shown)])


async def output(talk: Talk, session_id: bytes) -> list[int]:
    """The tokens of a session from now to its end."""
    tokens: list[int] = []
    base = None
    while True:
        events = await talk.hear()
        for step in events.committed:
            if step.session_id == session_id:
                base = step.base if base is None else base
                assert step.base == base + len(tokens)
                tokens += step.tokens
        if any(end.session_id == session_id for end in events.finished):
            return tokens


async def failure(talk: Talk) -> verifier_pb2.Failed:
    while not (events := await talk.hear()).failed:
        pass
    return events.failed[0]
