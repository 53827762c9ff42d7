"""The shared gRPC conventions, over real loopback connections."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import Overloaded, PeerRefused, StartupError
from outrider.net import rpc, taking
from outrider.net.outbox import Outbox
from outrider.net.rpc import MAX_MESSAGE_BYTES, add_methods, bind, channel, new_server
from outrider.v1 import common_pb2, registry_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.wire.hello import Identity, Role, check_hello, hello_from_wire, hello_to_wire
from outrider.wire.methods import GET_INFO

SHARE = 4
VERIFIER = Identity(Role.VERIFIER, "v", 7, "model", "tokenizer")
DRAFTER = Identity(Role.DRAFTER, "d", 8, "suffix", "")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"protocol_version": 2}, "protocol version 2, this side 5"),
        ({"role": "ROLE_DRAFTER"}, "expected a verifier here; the peer's role is ROLE_DRAFTER"),
        ({"role": 77}, "the peer's role is unknown"),
        ({"worker_id": ""}, "worker_id is empty"),
        ({"tokenizer_hash": "y"}, "hash 'y', expected 'tokenizer'"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_its_first_difference(
    changes: dict[str, Any], sentence: str
) -> None:
    hello = hello_to_wire(VERIFIER.hello())
    for field, value in changes.items():
        setattr(hello, field, common_pb2.Role.Value(value) if value == "ROLE_DRAFTER" else value)
    message = verifier_pb2.VerifierEvents(hello=hello)
    with pytest.raises(PeerRefused, match=sentence):
        check_hello(hello_from_wire(message), Role.VERIFIER, tokenizer_hash="tokenizer")


def test_without_a_tokenizer_a_peer_suits_every_one() -> None:
    hello = hello_to_wire(DRAFTER.hello())
    batch = verifier_pb2.DraftBatch(hello=hello)
    assert check_hello(hello_from_wire(batch), Role.DRAFTER, tokenizer_hash="tokenizer") == DRAFTER
    command = verifier_pb2.VerifierCommand(hello=hello_to_wire(VERIFIER.hello()))
    assert (
        check_hello(hello_from_wire(command), Role.VERIFIER, tokenizer_hash=DRAFTER.tokenizer_hash)
        == VERIFIER
    )


def test_a_hello_that_fits_gives_the_identity() -> None:
    command = verifier_pb2.VerifierCommand(hello=hello_to_wire(VERIFIER.hello()))
    assert check_hello(hello_from_wire(command), Role.VERIFIER) == VERIFIER


def test_a_stream_that_does_not_begin_with_a_hello_is_refused() -> None:
    command = verifier_pb2.VerifierCommand(close=verifier_pb2.CloseSession())
    with pytest.raises(PeerRefused, match="first message on a stream must be a hello"):
        check_hello(hello_from_wire(command), Role.ROUTER)
    with pytest.raises(PeerRefused, match="first message on a stream must be a hello"):
        check_hello(hello_from_wire(registry_pb2.LeaveRequest()), Role.ROUTER)


async def test_a_port_in_use_is_a_sentence_that_names_the_flag() -> None:
    first, second = new_server(), new_server()
    port = int(bind(first, "127.0.0.1", 0).rpartition(":")[2])
    await first.start()
    with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}.* with --grpc-port or --host"):
        bind(second, "127.0.0.1", port, flag="--grpc-port")
    await first.stop(None)


class Handlers(verifier_pb2_grpc.VerifierServicer):
    """A unary and a streaming handler whose bodies are given."""

    def __init__(self, body: Callable[[], Awaitable[None]]) -> None:
        self.body = body
        self.stream_closed = asyncio.Event()

    async def GetInfo(self, request: Any, context: Any) -> common_pb2.WorkerInfo:
        await self.body()
        return common_pb2.WorkerInfo()

    async def Sessions(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[verifier_pb2.VerifierEvents]:
        try:
            yield verifier_pb2.VerifierEvents()
            await self.body()
        finally:
            self.stream_closed.set()


@asynccontextmanager
async def serving(body: Callable[[], Awaitable[None]]) -> AsyncIterator[tuple[Handlers, Any]]:
    server, handlers = new_server(), Handlers(body)
    verifier_pb2_grpc.add_VerifierServicer_to_server(handlers, server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        yield handlers, verifier_pb2_grpc.VerifierStub(connection)
    await server.stop(None)


def fail_with(error: Exception) -> Callable[[], Awaitable[None]]:
    async def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (Overloaded("too many; come back"), grpc.StatusCode.RESOURCE_EXHAUSTED, "too many; come back"),
        (
            ValueError("a secret path"),
            grpc.StatusCode.INTERNAL,
            "internal error; the server's log has the details",
        ),
    ],
)
async def test_an_error_becomes_a_status_and_nothing_internal_is_told(
    error: Exception, code: grpc.StatusCode, told: str
) -> None:
    async with serving(fail_with(error)) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetInfo(common_pb2.GetInfoRequest())
        assert (unary.value.code(), unary.value.details()) == (code, told)
        outbox: Outbox[Any] = Outbox()
        call = stub.Sessions(outbox)
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for message in call:
                received.append(message)
        assert len(received) == 1
        assert (stream.value.code(), stream.value.details()) == (code, told)


def of_bytes(size: int) -> common_pb2.WorkerInfo:
    """A message of at least that size."""
    return common_pb2.WorkerInfo(hello=common_pb2.Hello(worker_id="x" * size))


async def test_a_message_over_the_limit_is_refused_in_one_line_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Large(Handlers):
        async def GetInfo(self, request: Any, context: Any) -> common_pb2.WorkerInfo:
            return of_bytes(MAX_MESSAGE_BYTES)

        async def Sessions(
            self, request_iterator: Any, context: Any
        ) -> AsyncIterator[verifier_pb2.VerifierEvents]:
            async for _ in request_iterator:
                yield verifier_pb2.VerifierEvents()

    server = new_server()
    verifier_pb2_grpc.add_VerifierServicer_to_server(Large(asyncio.Event().wait), server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    get_info = "/outrider.v1.Verifier/GetInfo"
    async with channel(address) as usual, channel(address, None, 2 * MAX_MESSAGE_BYTES) as roomy:
        ask = roomy.unary_unary(get_info, None, common_pb2.WorkerInfo.FromString)
        received = await ask(b"")
        assert received == of_bytes(MAX_MESSAGE_BYTES)
        with pytest.raises(grpc.aio.AioRpcError) as asked:
            await ask(bytes(MAX_MESSAGE_BYTES + 1))
        stream = roomy.stream_stream("/outrider.v1.Verifier/Sessions")(iter([bytes(MAX_MESSAGE_BYTES + 1)]))
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            async for _ in stream:
                pass
        assert not caplog.records
        with pytest.raises(grpc.aio.AioRpcError) as answered:  # gRPC may log that it could not send
            await usual.unary_unary(get_info)(b"")
        for error in (answered, asked, streamed):
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            told = error.value.details() or ""
            assert "larger than max" in told and str(MAX_MESSAGE_BYTES) in told and "\n" not in told
        await ask(b"")
    await server.stop(None)


async def test_bytes_that_are_no_message_are_refused_with_a_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = new_server()
    verifier_pb2_grpc.add_VerifierServicer_to_server(Handlers(asyncio.Event().wait), server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        with pytest.raises(grpc.aio.AioRpcError, match="the bytes are no message of this method") as refused:
            await connection.unary_unary("/outrider.v1.Verifier/GetInfo")(b"\xff")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(None)
    assert not caplog.records


@pytest.mark.parametrize("packed", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_nothing_is_unpacked(packed: grpc.Compression) -> None:
    """16 KB had become 16 MiB and 75 ms of a processor each time, before anybody looked at a key."""
    sizes: list[int] = []

    async def take(raw: bytes, context: Any) -> None:
        sizes.append(len(raw))
        raise Overloaded("enough")

    server, method = new_server(), GET_INFO[Role.VERIFIER]
    add_methods(server, {method: take}, decoded=False)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        with pytest.raises(grpc.aio.AioRpcError, match="enough"):
            await connection.unary_unary(method.path)(bytes(2**20), compression=packed)
    assert sizes[0] < 2**12
    await server.stop(None)


async def test_a_cancelled_call_closes_the_handlers_generator() -> None:
    async with serving(asyncio.Event().wait) as (handlers, stub):
        outbox: Outbox[Any] = Outbox()
        call = stub.Sessions(outbox)
        await anext(aiter(call))
        assert not handlers.stream_closed.is_set()
        call.cancel()
        await handlers.stream_closed.wait()


async def test_who_connects_and_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every role: nobody is known before a handshake is done, and each takes a descriptor."""
    monkeypatch.setattr(rpc, "HANDSHAKE_SECONDS", 0.1)
    server = new_server()
    port = int(bind(server, "127.0.0.1", 0).rpartition(":")[2])
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await reader.read()  # to the end
    writer.close()
    await server.stop(None)


async def test_an_outbox_is_bounded_and_ends_after_what_it_holds() -> None:
    outbox: Outbox[int] = Outbox(limit=2)
    assert [outbox.put(number) for number in range(3)] == [True, True, False]
    outbox.close()
    assert not outbox.put(9)
    assert [number async for number in outbox] == [0, 1]


@asynccontextmanager
async def unread_stream() -> AsyncIterator[tuple[asyncio.Event, grpc.aio.UnaryStreamCall[Any, Any]]]:
    """Gives a call that is written to for ever, one message of which is read, and what is set when its end is
    noticed."""
    noticed = asyncio.Event()

    async def endless(request: Any, context: Any) -> Any:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            noticed.set()

    server = new_server()
    handlers = {"Endless": grpc.unary_stream_rpc_method_handler(endless)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Unread", handlers),))
    port = bind(server, "127.0.0.1", 0).rpartition(":")[2]
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as client:
        call = client.unary_stream("/test.Unread/Endless")(b"")
        assert await call.read()
        yield noticed, call
    await server.stop(None)


async def test_a_call_whose_messages_are_not_taken_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "UNTAKEN_SECONDS", 0.2)
    async with unread_stream() as (noticed, call):
        await asyncio.wait_for(noticed.wait(), 120)
        with pytest.raises(grpc.aio.AioRpcError, match="was not taken for"):
            while await call.read() is not grpc.aio.EOF:
                pass


async def test_who_leaves_while_it_is_written_to_leaves_no_trace_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with unread_stream() as (noticed, call):
        await asyncio.sleep(0.1)  # until a write waits
        call.cancel()
        await asyncio.wait_for(noticed.wait(), 120)
    assert not caplog.records


def test_what_grpc_says_of_an_answer_that_nobody_waits_for_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = logging.getLogger("grpc._cython.cygrpc")
    told.error("Invalid encoding on %s", b"Bearer \xff")  # metadata of a call
    told.error("ExecuteBatchError raised in core by servicer method [%s]", "/outrider.v1.Registry/Beat")
    told.error("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


async def test_grpc_has_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every role: the others are for what the process opens itself."""
    monkeypatch.setattr("outrider.net.rpc.descriptors", lambda: 2 * SHARE)
    server = new_server(SHARE)
    port = int(bind(server, "127.0.0.1", 0).rpartition(":")[2])
    await server.start()
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    begun = [await reader.read(9) for reader, _ in opened]  # the head of a frame of settings, or nothing
    assert [len(each) for each in begun] == [9, 9, 0]
    for _, writer in opened:
        writer.close()
    await server.stop(None)


async def test_calls_that_come_faster_than_they_are_looked_at_wait_for_their_turn() -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return request

    server = new_server()
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    alone = [("grpc.use_local_subchannel_pool", 1)]  # two connections, not one
    async with (
        grpc.aio.insecure_channel(address, options=alone) as one,
        grpc.aio.insecure_channel(address, options=alone) as other,
    ):
        calls = [each.unary_unary("/test/Ask")(b"a") for each in (one, other) for _ in range(1000)]
        assert await asyncio.gather(*calls) == [b"a"] * 2000
    await server.stop(None)
