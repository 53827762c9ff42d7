"""The registry service: a router's store for workers that reach no other, over real loopback gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import IdInUse, Overloaded, PeerRefused
from outrider.net.rpc import bind, channel, new_server
from outrider.net.tls import Tls
from outrider.store.memory import MemoryStore
from outrider.v1 import registry_pb2, registry_pb2_grpc
from outrider.wire.hello import Role
from outrider.wire.registry import MAX_RECORD_BYTES, record_from_wire, record_to_wire
from outrider.worker.registration import RouterRegistrar
from router import registration_limits as limits_module
from router.fleet import Fleet
from router.metrics import Metrics
from router.registry import Registry
from router.worker_discovery import WorkerDiscovery
from tests.certificates import Authority


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


async def test_a_beat_is_answered_with_what_routers_said(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    identity = worker.info.identity
    async with channel(rig.address) as connection:
        stub = registry_pb2_grpc.RegistryStub(connection)
        beat = record_to_wire(worker.record())
        assert await stub.Beat(beat) == registry_pb2.BeatReply()
        await rig.until(lambda: rig.sessions.ready())
        assert (await stub.Beat(beat)).taken_in_by == ["router"]
        await rig.store.answer(identity, "another", "it is green", None)
        await rig.store.answer(identity, "third", None, "it is far")
        answer = await stub.Beat(beat)
    assert (answer.taken_in_by, answer.refusal, answer.trouble) == (["router"], "it is green", "it is far")


async def test_a_worker_that_leaves_is_forgotten_at_once_but_not_for_another_incarnations_sake(
    rig: Any,
) -> None:
    worker = await rig.worker(Role.VERIFIER, "v", incarnation=7)
    registrar = RouterRegistrar(rig.address)
    await registrar.beat(worker.record())
    await rig.until(lambda: rig.sessions.ready())
    stranger = await rig.worker(Role.VERIFIER, "v", incarnation=6)
    await registrar.leave(stranger.info.identity)
    assert (Role.VERIFIER, "v") in await anext(rig.store.workers())
    await registrar.leave(worker.info.identity)
    assert await anext(rig.store.workers()) == {}
    await rig.until(lambda: not rig.sessions.ready())
    await registrar.close()


async def test_another_protocol_version_is_refused(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    message = record_to_wire(worker.record())
    message.info.hello.protocol_version = 2
    async with channel(rig.address) as connection:
        stub = registry_pb2_grpc.RegistryStub(connection)
        code, sentence = await refusal(stub.Beat(message))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "protocol version 2, this side 5" in sentence


@pytest.mark.parametrize("role", ["ROLE_ROUTER", "ROLE_UNSPECIFIED"])
async def test_only_workers_register(rig: Any, role: str) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    message = record_to_wire(worker.record())
    message.info.hello.role = role
    async with channel(rig.address) as connection:
        code, sentence = await refusal(registry_pb2_grpc.RegistryStub(connection).Beat(message))
    assert (code, sentence) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f"expected a verifier here; the peer's role is {role}",
    )


async def test_a_registration_that_describes_nothing_or_no_address_is_refused(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    homeless = record_to_wire(worker.record())
    homeless.address = ""
    async with channel(rig.address) as connection:
        stub = registry_pb2_grpc.RegistryStub(connection)
        code, sentence = await refusal(stub.Beat(registry_pb2.Registration()))
        assert (code, "hello" in sentence) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        code, sentence = await refusal(stub.Beat(homeless))
        assert (code, "address must be" in sentence) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        code, sentence = await refusal(stub.Leave(registry_pb2.LeaveRequest()))
        assert (code, "hello must say" in sentence) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(
    "address",
    ["unix:/run/a.sock", "dns://192.0.2.1/h:1", "h", "h:", "h:0", "h:70000", "a b:1", "h\n:1", "x@h:1"],
)
async def test_an_address_is_a_host_and_a_port(rig: Any, address: str) -> None:
    """gRPC would open files, and ask name servers, that others name."""
    record = (await rig.worker(Role.DRAFTER, "d")).record()
    registrar = RouterRegistrar(rig.address)
    answer = await registrar.beat(replace(record, address=address))
    assert "address must be the host:port" in (answer.refusal or "")
    for sound in ("127.0.0.1:1", "[::1]:1", "[fe80::1%eth0]:65535", "10-0-0-1.outrider.pod.cluster.local:1"):
        assert record_from_wire(record_to_wire(replace(record, address=sound))).address == sound
    await registrar.close()


async def test_a_name_cannot_forge_lines_of_the_log(rig: Any) -> None:
    worker = await rig.worker(Role.DRAFTER, "d\n2026-01-01 ERROR router: all is lost")
    registrar = RouterRegistrar(rig.address)
    assert "must be printable" in ((await registrar.beat(worker.record())).refusal or "")
    await registrar.close()


@pytest.fixture
async def by_tls(rig: Any, tmp_path: Path) -> AsyncIterator[Callable[..., RouterRegistrar]]:
    """The rig's registry where certificates are asked for; makes registrars that show one with such names."""
    authority, server, made = Authority(), new_server(), list[RouterRegistrar]()
    Registry(rig.store, rig.metrics).add_to(server)
    address = bind(server, "127.0.0.1", 0, tls=Tls(authority.write(tmp_path / "router")))
    await server.start()

    def registrar(*names: str) -> RouterRegistrar:
        made.append(RouterRegistrar(address, Tls(authority.write(tmp_path / f"{len(made)}", *names))))
        return made[-1]

    yield registrar
    for one in made:
        await one.close()
    await server.stop(None)


async def test_a_drafter_that_calls_itself_as_a_verifier_disturbs_none(
    rig: Any, by_tls: Callable[..., RouterRegistrar]
) -> None:
    verifier = await rig.worker(Role.VERIFIER, "v")
    impostor = await rig.worker(Role.DRAFTER, "v")
    owner, hostile = by_tls("outrider:verifier"), by_tls("outrider:drafter")
    await owner.beat(verifier.record())
    await rig.until(lambda: rig.sessions.ready())
    held = rig.fleet.verifiers["v"]
    await hostile.leave(impostor.info.identity)
    await hostile.beat(impostor.record())
    await rig.until(lambda: rig.fleet.drafters.get("v") is not None)
    await hostile.leave(impostor.info.identity)
    await rig.until(lambda: not rig.fleet.drafters)
    with pytest.raises(PeerRefused, match="certificate is a drafter's"):
        await hostile.leave(verifier.info.identity)
    assert rig.fleet.verifiers == {"v": held} and not verifier.stream_over.is_set()


async def test_a_live_worker_belongs_to_the_certificate_that_registered_it(
    rig: Any, by_tls: Callable[..., RouterRegistrar]
) -> None:
    worker = await rig.worker(Role.VERIFIER, "v", incarnation=7)
    owner, other = by_tls("10-0-0-1.example", "outrider:verifier"), by_tls("10-0-0-2.example")
    await owner.beat(worker.record())
    await rig.until(lambda: rig.sessions.ready())
    for incarnation in (7, 8):
        another = await rig.worker(Role.VERIFIER, "v", incarnation=incarnation)
        answer = await other.beat(another.record())  # no refusal: it may be let in later, and need not end
        assert answer.trouble is not None and "is registered with another certificate" in answer.trouble
        with pytest.raises(IdInUse, match="is registered with another certificate"):
            await other.leave(another.info.identity)
    refused = "outrider_registrations_refused_total", {"reason": "id_in_use"}
    assert rig.metrics.registry.get_sample_value(*refused) == 4
    assert not worker.stream_over.is_set()
    anew = await rig.worker(Role.VERIFIER, "v", incarnation=9)
    renewed = by_tls("outrider:verifier", "10-0-0-1.example")
    await renewed.beat(anew.record())
    assert (await anext(rig.store.workers()))[Role.VERIFIER, "v"] == anew.record()
    await rig.until(lambda: rig.sessions.ready() and rig.fleet.verifiers["v"].identity.incarnation == 9)


async def test_a_host_registers_so_many_workers_and_no_more(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "MOST_WORKERS", 3)
    registrar = RouterRegistrar(rig.address)
    workers = [await rig.worker(Role.VERIFIER, f"v{number}") for number in range(4)]
    answers = [await registrar.beat(one.record()) for one in workers for _ in range(2)]
    said = [answer.trouble or "" for answer in answers]
    assert said[:6] == [""] * 6
    assert all("3 workers are registered from this address" in trouble for trouble in said[6:])
    refused = "outrider_registrations_refused_total", {"reason": "too_many"}
    assert rig.metrics.registry.get_sample_value(*refused) == 2
    await registrar.leave(workers[0].info.identity)
    assert (await registrar.beat(workers[3].record())).trouble is None
    await registrar.close()


def test_workers_that_come_anew_again_and_again_have_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the router connects, and whoever was cut off might be let in again."""
    monkeypatch.setattr(limits_module, "MOST_WORKERS", 3)
    limits = limits_module.RegistrationLimits()
    one, other = (Role.DRAFTER, "one"), (Role.DRAFTER, "other")

    def joined(description: int, now: float, key: Any = one, host: str = "h") -> bool:
        try:
            limits.worker(host, key, description, now)
        except Overloaded:
            return False
        return True

    assert [joined(description, 0.0) for description in range(10)] == [True] * 4 + [False] * 6
    assert joined(3, 0.0)  # as it was before
    assert not joined(0, 0.0, other) and joined(0, 0.0, other, "another host")
    limits.left("h", one)
    assert not joined(3, 0.0)
    assert [joined(description, 0.5) for description in range(10)] == [True] + [False] * 9
    assert [joined(description, 3.0) for description in range(10, 20)] == [True] * 4 + [False] * 6


def test_what_was_refused_is_not_owed() -> None:
    """Who shares a host's name with others could keep these out for minutes by a few large words."""
    limits = limits_module.RegistrationLimits()
    for _ in range(100):
        with pytest.raises(Overloaded):
            limits.word("h", 2**24, 0.0)
    limits.word("h", 1000, 0.0)
    said = 0
    with pytest.raises(Overloaded):
        while said < 2 * limits_module.BURST_BYTES:
            limits.word("h", 2**16, 0.0)
            said += 2**16
    limits.word("h", 1000, 1.0)


async def test_what_is_registered_is_rationed_and_bounded_before_it_is_decoded(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "BURST_BYTES", 200_000)
    monkeypatch.setattr(limits_module, "BYTES_PER_SECOND", 1e-9)
    garbage = b"\xff" * 70_000
    async with channel(rig.address) as connection:
        beat = connection.unary_unary("/outrider.v1.Registry/Beat")
        code, sentence = await refusal(beat(b"\x00" * (MAX_RECORD_BYTES + 1)))
        assert (code, "at most 131072 bytes" in sentence) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, sentence = await refusal(beat(garbage))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too much is registered" in sentence


async def test_a_worker_outlives_its_router(rig: Any) -> None:
    """The second router at the same address knows nothing of the first one's workers."""
    worker = await rig.worker(Role.VERIFIER, "v")
    fleet = Fleet(Metrics(), clock=lambda: 1.0)

    async def router_at(port: int, name: str) -> tuple[grpc.aio.Server, str, asyncio.Task[Any]]:
        server, store = new_server(), MemoryStore()
        Registry(store, fleet.metrics).add_to(server)
        address = bind(server, "127.0.0.1", port)
        await server.start()
        identity = rig.identity(name)
        recruiter = WorkerDiscovery(store, fleet, identity)
        return server, address, asyncio.create_task(recruiter.run())

    async def stop(server: grpc.aio.Server, recruiting: asyncio.Task[Any]) -> None:
        await server.stop(None)
        recruiting.cancel()
        await asyncio.gather(recruiting, return_exceptions=True)

    server, address, recruiting = await router_at(0, "first")
    worker.register(address)
    assert (await worker.states.get())[0] == "first"
    await stop(server, recruiting)
    router, why = await worker.states.get()
    assert router is None and "the router does not answer (" in why
    assert not fleet.verifiers
    server, address, recruiting = await router_at(int(address.rpartition(":")[2]), "second")
    while router is None:  # why it does not answer may be told in other words meanwhile
        router, _ = await worker.states.get()
    assert router == "second"
    assert list(fleet.verifiers) == ["v"]
    await worker.stop()
    await stop(server, recruiting)
