"""Workers join and leave: real registration on both sides, over real loopback gRPC."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import PeerRefused
from outrider.rpc import Identity, Outbox, Role, bind, channel, new_server
from outrider.v1 import registry_pb2, registry_pb2_grpc
from outrider.wire.codec import worker_info_to_wire
from router.registry import Registry


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return refused.value.code(), refused.value.details() or ""


async def test_a_verifier_that_joins_is_served_and_one_that_leaves_is_not(rig: Any) -> None:
    assert not rig.sessions.ready()
    worker = await rig.verifier("v", model="tiny")
    assert rig.sessions.ready()
    (served,) = rig.sessions.models()
    assert (served.name, served.vocab_size, served.max_context, served.created) == ("tiny", 100, 64, 1234)
    assert served.eos_token_ids == {0, 3}
    assert served.tokenizer.json == "json of tokens"
    assert b'outrider_workers{role="verifier"} 1.0' in rig.metrics.exposition()
    worker.registration.cancel()
    await rig.until(lambda: not rig.sessions.ready())
    await worker.stream_over.wait()
    assert rig.sessions.models() == []
    assert b'outrider_workers{role="verifier"} 0.0' in rig.metrics.exposition()


async def test_a_model_is_served_until_its_last_verifier_leaves(rig: Any) -> None:
    one, other = await rig.verifier("v1"), await rig.verifier("v2")
    one.registration.cancel()
    await rig.until(lambda: len(rig.fleet.verifiers) == 1)
    assert [model.name for model in rig.sessions.models()] == ["m"]
    other.registration.cancel()
    await rig.until(lambda: rig.sessions.models() == [])


async def test_a_drafter_of_another_tokenizer_is_refused_with_the_first_difference(rig: Any) -> None:
    await rig.verifier()
    drafter = await rig.worker(Role.DRAFTER, "d", tokenizer="other")
    with pytest.raises(PeerRefused, match="the target 'm': 'json of tokens' is not 'json of other'"):
        await drafter.register(rig.address)
    assert rig.fleet.drafters == {}


async def test_a_drafter_that_comes_early_hears_when_there_is_a_target_to_compare_it_with(rig: Any) -> None:
    wrong, right = (
        await rig.worker(Role.DRAFTER, "wrong", tokenizer="other"),
        await rig.worker(Role.DRAFTER, "r"),
    )
    refused, _ = wrong.register(rig.address), right.register(rig.address)
    await rig.until(lambda: len(rig.fleet.drafters) == 2)
    assert wrong.states.empty() and right.states.empty()
    await rig.verifier()
    with pytest.raises(PeerRefused, match="'json of tokens' is not 'json of other'"):
        await refused
    router, _ = await right.states.get()
    assert router is not None
    assert list(rig.fleet.drafters) == ["r"]


async def test_another_model_under_the_same_name_is_refused(rig: Any) -> None:
    await rig.verifier("v1")
    other = await rig.worker(Role.VERIFIER, "v2", fingerprint="other")
    with pytest.raises(PeerRefused, match="another verifier serves 'm' with a different checkpoint"):
        await other.register(rig.address)


async def test_another_protocol_version_is_refused(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    info = worker_info_to_wire(worker.info)
    info.hello.protocol_version = 2
    async with channel(rig.address) as connection:
        outbox: Outbox[registry_pb2.Registration] = Outbox()
        outbox.put(registry_pb2.Registration(info=info, address=worker.address))
        code, sentence = await refusal(registry_pb2_grpc.RegistryStub(connection).Register(outbox))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol version 2, this side 1" in sentence


@pytest.mark.parametrize("role", ["ROLE_ROUTER", "ROLE_UNSPECIFIED"])
async def test_only_workers_register(rig: Any, role: str) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    info = worker_info_to_wire(worker.info)
    info.hello.role = role
    async with channel(rig.address) as connection:
        outbox: Outbox[registry_pb2.Registration] = Outbox()
        outbox.put(registry_pb2.Registration(info=info, address=worker.address))
        code, sentence = await refusal(registry_pb2_grpc.RegistryStub(connection).Register(outbox))
    assert (code, sentence) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f"expected a verifier here; the peer's role is {role}",
    )


async def test_a_registration_that_describes_nothing_is_refused(rig: Any) -> None:
    async with channel(rig.address) as connection:
        outbox: Outbox[registry_pb2.Registration] = Outbox()
        outbox.close()
        code, sentence = await refusal(registry_pb2_grpc.RegistryStub(connection).Register(outbox))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "must describe the worker" in sentence


async def test_a_worker_that_falls_silent_is_gone(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    async with channel(rig.address) as connection:
        outbox: Outbox[registry_pb2.Registration] = Outbox()  # it stays open, and no heartbeat follows
        outbox.put(registry_pb2.Registration(info=worker_info_to_wire(worker.info), address=worker.address))
        call = registry_pb2_grpc.RegistryStub(connection).Register(outbox)
        replies = aiter(call)
        await anext(replies)
        assert rig.sessions.ready()
        code, sentence = await refusal(replies)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "no heartbeat for 2 seconds" in sentence
    assert not rig.sessions.ready()


async def test_a_worker_with_heartbeats_stays_longer_than_the_silence_allowed(rig: Any) -> None:
    worker = await rig.verifier()
    await asyncio.sleep(3)
    assert rig.sessions.ready()
    assert worker.states.empty()


async def test_a_worker_that_cannot_be_reached_is_told_and_tries_again(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    worker.address = "127.0.0.1:1"
    worker.register(rig.address)
    router, reason = await worker.states.get()
    assert router is None
    assert "cannot reach the worker at the address it registered" in reason
    assert not worker.registration.done()


async def test_another_process_at_the_registered_address_is_not_taken_for_the_worker(rig: Any) -> None:
    impostor = Identity(Role.VERIFIER, "v", 99, "VERIFIER model", "tokens")
    worker = await rig.worker(Role.VERIFIER, "v", answers_as=impostor)
    worker.register(rig.address)
    router, reason = await worker.states.get()
    assert router is None
    assert "another process answered" in reason
    assert not rig.sessions.ready()


async def test_two_processes_cannot_have_one_worker_id_but_a_successor_gets_in(rig: Any) -> None:
    first = await rig.verifier("v", incarnation=1)
    second = await rig.worker(Role.VERIFIER, "v", incarnation=2)
    second.register(rig.address)
    router, reason = await second.states.get()
    assert router is None
    assert "another process is registered as 'v'" in reason
    first.registration.cancel()
    while router is None:
        router, _ = await second.states.get()
    assert rig.fleet.verifiers["v"].identity.incarnation == 2


async def test_a_process_that_registers_again_replaces_its_former_registration(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    async with channel(rig.address) as connection:
        outbox: Outbox[registry_pb2.Registration] = (
            Outbox()
        )  # held open: the router cannot know that it is stale
        outbox.put(registry_pb2.Registration(info=worker_info_to_wire(worker.info), address=worker.address))
        stale = aiter(registry_pb2_grpc.RegistryStub(connection).Register(outbox))
        await anext(stale)
        former = rig.fleet.verifiers["v"]
        worker.register(rig.address)
        assert (await worker.states.get())[0] is not None
        assert rig.fleet.verifiers["v"] is not former
        code, sentence = await refusal(stale)
        assert (code, sentence) == (
            grpc.StatusCode.UNAVAILABLE,
            "the stream between the router and the worker broke off",
        )
    assert rig.sessions.ready()


async def test_a_worker_whose_session_stream_breaks_registers_anew(rig: Any) -> None:
    worker = await rig.verifier()
    worker.events.close()  # the worker's side ends the stream
    router, reason = await worker.states.get()
    assert router is None
    assert "stream between the router and the worker broke off" in reason
    worker.events = Outbox()
    router, _ = await worker.states.get()
    assert router is not None
    assert rig.sessions.ready()


async def test_a_worker_outlives_its_router(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")

    async def router_at(port: int) -> tuple[grpc.aio.Server, str]:
        server = new_server()
        registry_pb2_grpc.add_RegistryServicer_to_server(
            Registry(rig.fleet, Identity(Role.ROUTER, "r", 5), lambda target, draft: None), server
        )
        address = bind(server, "127.0.0.1", port)
        await server.start()
        return server, address

    server, address = await router_at(0)
    worker.register(address)
    assert (await worker.states.get())[0] is not None
    await server.stop(None)
    assert (await worker.states.get())[0] is None
    await rig.until(lambda: not rig.sessions.ready())
    server, _ = await router_at(int(address.rpartition(":")[2]))
    while (await worker.states.get())[0] is None:
        pass
    assert rig.sessions.ready()
    await worker.stop()
    await server.stop(None)
