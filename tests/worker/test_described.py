"""What a worker tells of itself, by a real server."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from outrider.net.rpc import ask, bind, channel, new_server
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.wire.methods import GET_INFO, GET_TOKENIZER
from outrider.worker.described import add_description

MODEL = ModelInfo("m", "print", "Arch", 1, 10, 64, (), "cpu", "float32", True)
INFO = WorkerInfo(Identity(Role.DRAFTER, "d", 1, "print", "tokens"), MODEL, 8, 16)
TOKENIZER = TokenizerFiles("tokens", "{}", "")


async def test_anyone_may_ask_what_it_is_and_whether_it_is_well() -> None:
    well = True
    server = new_server()
    add_description(server, INFO, TOKENIZER, lambda: well)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    connection = channel(address)
    try:
        assert await ask(connection, GET_INFO[Role.DRAFTER], None, 60) == INFO
        assert await ask(connection, GET_TOKENIZER[Role.DRAFTER], None, 60) == TOKENIZER
        assert await health(connection) == health_pb2.HealthCheckResponse.SERVING
        well = False
        assert await health(connection) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert {"outrider.v1.Drafter", "grpc.health.v1.Health"} <= await services(connection)
    finally:
        await connection.close(None)
        await server.stop(None)


async def health(connection: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(connection)
    asked = health_pb2.HealthCheckRequest(service="outrider.v1.Drafter")
    return int((await stub.Check(asked)).status)


async def services(connection: grpc.aio.Channel) -> set[str]:
    """By the old name of reflection and by the new one, which must tell the same."""
    told = []
    for version in ("v1alpha", "v1"):
        ask = connection.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        told.append({each.name async for answer in call for each in answer.list_services_response.service})
    assert told[0] == told[1]
    return told[0]
