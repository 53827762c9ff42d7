"""What passes between a worker and the registry, and a worker's record as a store keeps it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.errors import InvalidRequest, PeerRefused
from outrider.v1 import registry_pb2
from outrider.wire.codec import (
    SMALL_BYTES,
    Codec,
    check_named,
    drafter_load_from_wire,
    drafter_load_to_wire,
    verifier_load_from_wire,
    verifier_load_to_wire,
    worker_info_from_wire,
    worker_info_to_wire,
)
from outrider.wire.description import WorkerRecord
from outrider.wire.hello import Hello, Identity, Role, check_hello, hello_from_wire, hello_to_wire
from outrider.wire.load import DrafterLoad, Load, VerifierLoad


@dataclass(frozen=True, slots=True)
class Answer:
    """What routers have said to a worker since it registered."""

    taken_in_by: tuple[str, ...] = ()  # ids of routers, sorted
    refusal: str | None = None  # a router's sentence: the worker does not fit and should end
    trouble: str | None = None  # a router's sentence: it tries again to take the worker in


def record_to_wire(record: WorkerRecord) -> registry_pb2.Registration:
    load = record.load
    return registry_pb2.Registration(
        info=worker_info_to_wire(record.info),
        address=record.address,
        verifier_load=verifier_load_to_wire(load) if isinstance(load, VerifierLoad) else None,
        drafter_load=drafter_load_to_wire(load) if isinstance(load, DrafterLoad) else None,
        join_address=record.join_address,
    )


def record_from_wire(message: registry_pb2.Registration) -> WorkerRecord:
    """Returns the record. Raises InvalidRequest as worker_info_from_wire does, and unless its names are
    printable and its address is a host and a port: gRPC would take others for files or for name servers."""
    info = worker_info_from_wire(message.info)
    if not is_address(message.address):
        raise InvalidRequest(
            "address must be the host:port on which the worker serves its own RPCs", field="address"
        )
    if message.join_address and not is_address(message.join_address):
        raise InvalidRequest("join_address must be a host:port of the worker", field="join_address")
    check_named(info, message.address, message.join_address)
    load: Load | None = None
    if info.identity.role is Role.VERIFIER and message.HasField("verifier_load"):
        load = verifier_load_from_wire(message.verifier_load)
    elif info.identity.role is Role.DRAFTER and message.HasField("drafter_load"):
        load = drafter_load_from_wire(message.drafter_load)
    return WorkerRecord(info, message.address, load, message.join_address)


def is_address(address: str) -> bool:
    """Returns whether it is a host:port, and nothing that gRPC takes for a file or a name server."""
    parts = re.fullmatch(r"(\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[\w.-]+):([0-9]{1,5})", address, re.ASCII)
    return parts is not None and 0 < int(parts[3]) < 2**16


def _beat_from_wire(message: registry_pb2.Registration) -> WorkerRecord:
    _worker(hello_from_wire(message.info))
    try:
        return record_from_wire(message)
    except InvalidRequest as error:  # the worker was started with something that it has to be told
        raise PeerRefused(error.message) from None


def _leave_from_wire(message: registry_pb2.LeaveRequest) -> Identity:
    hello = hello_from_wire(message)
    if hello is None:
        raise InvalidRequest("hello must say who leaves", field="hello")
    return _worker(hello)


def _worker(hello: Hello | None) -> Identity:
    """Returns the sender, which must be a worker. Raises PeerRefused."""
    drafts = hello is not None and hello.role == Role.DRAFTER
    return check_hello(hello, Role.DRAFTER if drafts else Role.VERIFIER)


def _answer_to_wire(answer: Answer) -> registry_pb2.BeatReply:
    return registry_pb2.BeatReply(
        taken_in_by=answer.taken_in_by, refusal=answer.refusal or "", trouble=answer.trouble or ""
    )


def _answer_from_wire(message: registry_pb2.BeatReply) -> Answer:
    return Answer(tuple(message.taken_in_by), message.refusal or None, message.trouble or None)


def _leave_to_wire(identity: Identity) -> registry_pb2.LeaveRequest:
    return registry_pb2.LeaveRequest(hello=hello_to_wire(identity.hello()))


MAX_RECORD_BYTES = 2**17  # a drafter's tells its round trips to some thousand verifiers

RECORD = Codec(
    registry_pb2.Registration, record_to_wire, record_from_wire, MAX_RECORD_BYTES
)  # as a store keeps it
BEATS = Codec(registry_pb2.Registration, record_to_wire, _beat_from_wire, MAX_RECORD_BYTES)
ANSWERS = Codec(registry_pb2.BeatReply, _answer_to_wire, _answer_from_wire, MAX_RECORD_BYTES)
LEAVES = Codec(registry_pb2.LeaveRequest, _leave_to_wire, _leave_from_wire, SMALL_BYTES)
LEFT: Codec[None, registry_pb2.LeaveReply] = Codec(
    registry_pb2.LeaveReply, lambda _: registry_pb2.LeaveReply(), lambda _: None, SMALL_BYTES
)
