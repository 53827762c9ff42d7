"""Who a process is, and the first message of every stream, which says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from outrider.errors import PeerRefused
from outrider.v1 import common_pb2

PROTOCOL_VERSION = 2  # of the messages in proto/: both ends of a stream have the same


class Role(IntEnum):
    """A process's part in the service; the values are outrider.v1.Role's."""

    ROUTER = common_pb2.ROLE_ROUTER
    VERIFIER = common_pb2.ROLE_VERIFIER
    DRAFTER = common_pb2.ROLE_DRAFTER


WorkerKey = tuple[Role, str]
"""(role, worker_id): a worker of one role never stands for one of another, whatever it calls itself."""


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

    def hello(self) -> common_pb2.Hello:
        return common_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            role=common_pb2.Role.Name(self.role),
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            model_fingerprint=self.model_fingerprint,
            tokenizer_hash=self.tokenizer_hash,
        )


class Greeting(Protocol):
    """A message type that carries a hello: the first one on every stream."""

    @property
    def hello(self) -> common_pb2.Hello: ...
    def HasField(self, field_name: Any) -> bool: ...


def check_hello(message: Greeting, role: Role, *, tokenizer_hash: str | None = None) -> Identity:
    """Returns the sender's identity, from the first message of its stream.

    `tokenizer_hash` is compared if both sides have one: an empty one suits every tokenizer. Raises
    PeerRefused with one sentence that names the first difference.
    """
    if not message.HasField("hello"):
        raise PeerRefused("the first message on a stream must be a hello")
    hello = message.hello
    if hello.protocol_version != PROTOCOL_VERSION:
        raise PeerRefused(
            f"the peer speaks protocol version {hello.protocol_version}, this side {PROTOCOL_VERSION}: "
            "run the same release of Outrider on both"
        )
    if int(hello.role) != role:
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
    check_hello does."""
    rest = aiter(messages)
    first = await anext(rest, None)
    if first is None:
        raise PeerRefused("the stream ended before its hello")
    return check_hello(first, role, tokenizer_hash=tokenizer_hash), rest
