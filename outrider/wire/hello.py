"""Who a process is, and the first message of every stream, which says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from outrider.errors import PeerRefused
from outrider.v1 import common_pb2

HELLO_SECONDS = 5.0  # in which a stream's first message must come
PROTOCOL_VERSION = 5  # of the messages in proto/: both ends of a stream have the same


class Role(IntEnum):
    """A process's part in the service; the values are outrider.v1.Role's."""

    ROUTER = common_pb2.ROLE_ROUTER
    VERIFIER = common_pb2.ROLE_VERIFIER
    DRAFTER = common_pb2.ROLE_DRAFTER


MAX_NAME = 256  # characters of what a process says that it, or its model, is called
WorkerKey = tuple[Role, str]
"""(role, worker_id): a worker of one role never stands for one of another, whatever it calls itself."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a process says of itself, before it is checked."""

    protocol_version: int
    role: int
    worker_id: str
    incarnation: int
    model_fingerprint: str
    tokenizer_hash: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is: the content of a hello."""

    role: Role
    worker_id: str  # stable name, unique among the workers of its role
    incarnation: int  # 64 bits, random, drawn at process start
    model_fingerprint: str = ""  # empty for a router
    tokenizer_hash: str = ""  # empty for a router, and for a drafter that suits every tokenizer

    @property
    def key(self) -> WorkerKey:
        return self.role, self.worker_id

    def hello(self) -> Hello:
        return Hello(
            PROTOCOL_VERSION,
            self.role,
            self.worker_id,
            self.incarnation,
            self.model_fingerprint,
            self.tokenizer_hash,
        )


class Greeting(Protocol):
    """A message that carries a hello, if it is the first one on its stream."""

    @property
    def hello(self) -> Hello | None: ...


def check_hello(hello: Hello | None, role: Role, *, tokenizer_hash: str | None = None) -> Identity:
    """Returns the sender's identity, from the hello in the first message of its stream.

    `tokenizer_hash` is compared if both sides have one: an empty one suits every tokenizer. Raises
    PeerRefused with one sentence that names the first difference.
    """
    if hello is None:
        raise PeerRefused("the first message on a stream must be a hello")
    if hello.protocol_version != PROTOCOL_VERSION:
        raise PeerRefused(
            f"the peer speaks protocol version {hello.protocol_version}, this side {PROTOCOL_VERSION}: "
            "run the same release of Outrider on both"
        )
    if hello.role != role:
        spoken = common_pb2.Role.Name(hello.role) if hello.role in common_pb2.Role.values() else "unknown"
        raise PeerRefused(f"expected a {role.name.lower()} here; the peer's role is {spoken}")
    if not hello.worker_id:
        raise PeerRefused("the hello's worker_id is empty; every process has a name")
    if tokenizer_hash and hello.tokenizer_hash and hello.tokenizer_hash != tokenizer_hash:
        raise PeerRefused(
            f"{hello.worker_id} has the tokenizer with hash {hello.tokenizer_hash!r}, "
            f"expected {tokenizer_hash!r}"
        )
    return Identity(role, hello.worker_id, hello.incarnation, hello.model_fingerprint, hello.tokenizer_hash)


G = TypeVar("G", bound=Greeting)


async def read_hello(
    messages: AsyncIterator[G], role: Role, *, tokenizer_hash: str | None = None
) -> tuple[Identity, AsyncIterator[G]]:
    """Returns who opened a stream, and the messages that follow the hello. Raises PeerRefused as
    check_hello does, and if no hello comes within HELLO_SECONDS."""
    rest = aiter(messages)
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(rest, None)
    except TimeoutError:
        raise PeerRefused(f"no hello came within {HELLO_SECONDS:g} seconds") from None
    if first is None:
        raise PeerRefused("the stream ended before its hello")
    return check_hello(first.hello, role, tokenizer_hash=tokenizer_hash), rest


def hello_to_wire(hello: Hello | None) -> common_pb2.Hello | None:
    if hello is None:
        return None
    return common_pb2.Hello(
        protocol_version=hello.protocol_version,
        role=hello.role,  # type: ignore[arg-type]
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        model_fingerprint=hello.model_fingerprint,
        tokenizer_hash=hello.tokenizer_hash,
    )


def hello_from_wire(message: Any) -> Hello | None:
    """Returns the hello in a message that may have one."""
    if not message.HasField("hello"):
        return None
    hello = message.hello
    return Hello(
        hello.protocol_version,
        int(hello.role),
        hello.worker_id,
        hello.incarnation,
        hello.model_fingerprint,
        hello.tokenizer_hash,
    )
