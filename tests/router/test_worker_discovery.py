"""Workers join and leave: real registration on both sides, over real loopback gRPC."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import PeerRefused
from outrider.net.backoff import Backoff
from outrider.net.outbox import Outbox
from outrider.net.rpc import MAX_MESSAGE_BYTES
from outrider.store.memory import MemoryStore
from outrider.store.store import TTL_SECONDS
from outrider.v1 import verifier_pb2
from outrider.wire.codec import tokenizer_to_wire
from outrider.wire.hello import Identity, Role
from outrider.wire.load import VerifierLoad
from router import worker_discovery as discovery_module
from router.compatibility import Registration, incompatibility
from router.fleet import Fleet
from router.metrics import Metrics
from router.transcript import Transcript
from router.worker_discovery import MOST_JOINING, WorkerDiscovery
from tests.router.asking import request


async def test_a_verifier_that_joins_is_served_and_one_that_leaves_is_not(rig: Any) -> None:
    assert not rig.sessions.ready()
    worker = await rig.verifier("v", model="tiny")
    assert rig.sessions.ready()
    (served,) = rig.sessions.models()
    assert (served.name, served.vocab_size, served.max_context, served.created) == ("tiny", 100, 1024, 1234)
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


async def test_a_drafter_of_another_tokenizer_is_refused(rig: Any) -> None:
    await rig.verifier()
    drafter = await rig.worker(Role.DRAFTER, "d", tokenizer="other")
    with pytest.raises(PeerRefused, match=r"of the target 'm' \(its hash is other, the target's tokens"):
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
    with pytest.raises(PeerRefused, match="its hash is other"):
        await refused
    router, _ = await right.states.get()
    assert router is not None
    assert list(rig.fleet.drafters) == ["r"]


async def test_a_drafter_without_a_target_is_told_what_it_waits_for(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery_module, "UNJUDGED_SECONDS", 0.01)
    drafter = await rig.worker(Role.DRAFTER, "d")
    drafter.register(rig.address)
    assert await drafter.states.get() == (None, discovery_module.NO_TARGET)
    await rig.verifier()
    router, _ = await drafter.states.get()
    assert router is not None


async def test_whether_a_drafter_reaches_its_verifier_is_found_out_before_it_has_sessions(rig: Any) -> None:
    verifier = await rig.verifier("v")
    for name, why in (("near", ""), ("far", "nothing listens there\x1b[2J")):
        drafter = await rig.worker(Role.DRAFTER, name)
        drafter.unreached = why
        drafter.register(rig.address)
        await rig.until(lambda drafter=drafter: drafter.tried)
        assert drafter.tried == [verifier.address]
    await rig.until(rig.sessions.degraded)
    assert rig.sessions.degraded() == "drafter far does not draft for verifier v"
    assert rig.fleet.doubts.about("far", "v") and not rig.fleet.doubts.about("near", "v")


@pytest.mark.parametrize("ttl_seconds", [TTL_SECONDS])
async def test_a_drafter_whose_target_is_known_but_not_taken_in_yet_is_not_judged_by_another(
    rig: Any,
) -> None:
    """A router that has just started meets the workers of all models in any order."""
    unreachable = await rig.worker(Role.VERIFIER, "its target", model="b", tokenizer="other")
    listening, unreachable.address = unreachable.address, "127.0.0.1:1"
    unreachable.register(rig.address)
    assert (await unreachable.states.get())[0] is None
    early, late = [await rig.worker(Role.DRAFTER, name, tokenizer="other") for name in ("early", "late")]
    early.register(rig.address)
    await rig.until(lambda: "early" in rig.fleet.drafters)
    await rig.verifier("v", model="a")
    late.register(rig.address)
    await rig.until(lambda: "late" in rig.fleet.drafters)
    assert early.states.empty() and late.states.empty()
    unreachable.address = listening
    for drafter in (early, late):
        router, _ = await drafter.states.get()
        assert router is not None


async def test_another_model_under_the_same_name_is_refused(rig: Any) -> None:
    await rig.verifier("v1")
    other = await rig.worker(Role.VERIFIER, "v2", fingerprint="other")
    with pytest.raises(PeerRefused, match="another verifier serves 'm' with a different checkpoint"):
        await other.register(rig.address)


@pytest.mark.parametrize("ttl_seconds", [TTL_SECONDS])
async def test_a_worker_that_falls_silent_is_gone(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    await rig.store.beat(worker.record())  # and never again
    await rig.until(lambda: rig.sessions.ready())
    await rig.until(lambda: not rig.sessions.ready())
    await worker.stream_over.wait()


@pytest.mark.parametrize("ttl_seconds", [TTL_SECONDS])
async def test_a_worker_that_beats_outlives_its_ttl(rig: Any) -> None:
    worker = await rig.verifier()
    silent = await rig.worker(Role.VERIFIER, "silent")
    for _ in range(2):  # as long as it takes for a silent one to go, twice
        await rig.store.beat(silent.record())
        await rig.until(lambda: "silent" in rig.fleet.verifiers)
        await rig.until(lambda: "silent" not in rig.fleet.verifiers)
    assert "v" in rig.fleet.verifiers
    assert worker.states.empty()
    assert not worker.stream_over.is_set()


async def test_what_a_worker_said_of_its_load_counts_until_it_says_more(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    worker.load = VerifierLoad(3, 2, 0.5, typical_step_seconds=0.1, draining=True)
    await rig.store.beat(worker.record())
    await rig.until(lambda: bool(rig.fleet.verifiers))
    load = rig.fleet.verifiers["v"].load
    assert (load.running, load.waiting, load.kv_usage, load.typical_step_seconds) == (3, 2, 0.5, 0.1)
    assert rig.fleet.verifier_for(Transcript(request())) is None  # it drains


async def test_what_a_verifier_says_of_its_load_with_its_hello_counts_from_the_first_session_on(
    rig: Any,
) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    worker.greeting_load = verifier_pb2.VerifierLoad(running=3, draining=True)
    await rig.store.beat(worker.record())  # its load is unknown there
    await rig.until(lambda: bool(rig.fleet.verifiers))
    assert (rig.fleet.verifiers["v"].load.running, rig.fleet.verifiers["v"].load.draining) == (3, True)


async def test_a_worker_that_cannot_be_reached_is_told_and_tried_again(rig: Any) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    listening, worker.address = worker.address, "127.0.0.1:1"
    worker.register(rig.address)
    router, reason = await worker.states.get()
    assert router is None
    assert "cannot reach the worker at the address it registered" in reason
    assert "127.0.0.1" not in reason
    await rig.store.leave(worker.info.identity)  # while it lives it does not move
    worker.address = listening
    assert (await worker.states.get())[0] is not None


@pytest.mark.parametrize("role", [Role.VERIFIER, Role.DRAFTER])
async def test_another_process_at_the_registered_address_is_not_taken_for_the_worker(
    rig: Any, role: Role
) -> None:
    impostor = Identity(role, "v", 99, "VERIFIER model", "tokens")
    worker = await rig.worker(Role.VERIFIER, "v", answers_as=impostor)
    worker.register(rig.address)
    router, reason = await worker.states.get()
    assert router is None
    assert "another process answered" in reason
    assert not rig.sessions.ready()


async def test_a_new_incarnation_takes_the_place_of_the_former(rig: Any) -> None:
    first = await rig.verifier("v", incarnation=1)
    held = rig.fleet.verifiers["v"]
    second = await rig.worker(Role.VERIFIER, "v", incarnation=2)
    await rig.store.beat(second.record())  # before the first has said anything of leaving
    first.registration.cancel()
    await rig.until(lambda: rig.fleet.verifiers.get("v") not in (None, held))
    await first.stream_over.wait()
    await asyncio.gather(first.registration, return_exceptions=True)  # it has said now that it leaves
    assert (Role.VERIFIER, "v") in await anext(rig.store.workers())
    assert rig.fleet.verifiers["v"].identity.incarnation == 2


async def test_a_worker_whose_session_stream_breaks_is_connected_anew(rig: Any) -> None:
    worker = await rig.verifier()
    former = rig.fleet.verifiers["v"]
    before = worker.events
    worker.events = Outbox()
    before.close()  # the worker's side ends the stream
    await rig.until(lambda: rig.fleet.verifiers.get("v") not in (None, former))
    assert rig.sessions.ready()
    assert worker.states.empty()  # its record lived all the time


async def test_of_a_worker_whose_server_is_gone_no_task_is_left_that_would_write_to_it(rig: Any) -> None:
    def writing() -> list[asyncio.Task[Any]]:
        """gRPC's own, which take commands from the outbox."""
        return [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())]

    worker = await rig.verifier("v")
    assert len(writing()) == 1
    await worker.server.stop(None)
    await rig.until(lambda: not rig.fleet.verifiers)
    await rig.until(lambda: not writing())


async def test_a_worker_that_talks_nonsense_is_tried_again_and_harms_nobody(rig: Any) -> None:
    await rig.verifier("sound")
    worker = await rig.worker(Role.VERIFIER, "v", model="n", fingerprint="another")
    sound, worker.tokenizer = worker.tokenizer, None  # GetTokenizer fails
    worker.register(rig.address)
    assert (await worker.states.get())[0] is None
    assert list(rig.fleet.verifiers) == ["sound"]
    worker.tokenizer = sound
    assert (await worker.states.get())[0] is not None


async def test_no_drafter_is_asked_for_a_tokenizer(rig: Any) -> None:
    """Reading one takes memory and stops the event loop: seconds for a few MiB of whoever may register."""
    await rig.verifier()
    for hash in ("tokens", "other"):
        drafter = await rig.worker(Role.DRAFTER, hash, tokenizer=hash)
        drafter.tokenizer = None  # GetTokenizer fails
        drafter.register(rig.address)
        await asyncio.wait(
            {drafter.registration, asyncio.create_task(drafter.states.get())}, return_when="FIRST_COMPLETED"
        )
    assert list(rig.fleet.drafters) == ["tokens"] and drafter.registration.done()


async def test_only_a_tokenizer_may_be_larger_than_other_messages(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await rig.worker(Role.VERIFIER, "v")
    worker.tokenizer = replace(worker.tokenizer, json="x" * (MAX_MESSAGE_BYTES + 1))
    worker.register(rig.address)
    assert (await worker.states.get())[0] is not None
    assert rig.fleet.verifiers["v"].registration.tokenizer == worker.tokenizer
    monkeypatch.setattr(discovery_module, "MAX_TOKENIZER_BYTES", MAX_MESSAGE_BYTES)
    other = await rig.worker(Role.VERIFIER, "w", model="n", fingerprint="another")
    other.tokenizer = worker.tokenizer
    with pytest.raises(PeerRefused, match="the worker's tokenizer is too large"):
        await other.register(rig.address)
    assert list(rig.fleet.verifiers) == ["v"]


async def test_a_tokenizer_is_fetched_and_kept_once_for_all_verifiers_that_have_it(rig: Any) -> None:
    fetched: list[str] = []
    workers = [await rig.worker(Role.VERIFIER, f"v{number}") for number in range(6)]
    for worker in workers:

        async def send(worker: Any = worker) -> Any:
            fetched.append(worker.worker_id)
            return tokenizer_to_wire(replace(worker.tokenizer, chat_template=worker.worker_id))

        worker.tokenizer_sent = send
        worker.register(rig.address)
    await rig.until(lambda: len(rig.fleet.verifiers) == 6)
    assert len(fetched) == 1
    files = {id(one.registration.tokenizer) for one in rig.fleet.verifiers.values()}
    assert len(files) == 1
    for worker in workers:
        worker.registration.cancel()
    await rig.until(lambda: not rig.fleet.verifiers)
    workers[0].register(rig.address)
    await rig.until(lambda: bool(rig.fleet.verifiers))
    assert len(fetched) == 2  # it may have been started anew with another one


async def test_a_few_workers_are_connected_to_at_once(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one role do not wait for those of the other, nor for ever for who does not answer."""
    monkeypatch.setattr(discovery_module, "TURN_SECONDS", 1000.0)
    discovery = WorkerDiscovery(MemoryStore(), rig.fleet, rig.identity("another"))
    connecting: list[Role] = []
    answered = asyncio.Event()

    async def connect(role: Role) -> None:
        async with discovery_module._turn(discovery._turns[role], discovery_module.TURN_SECONDS):
            connecting.append(role)
            await answered.wait()

    tasks = [asyncio.create_task(connect(Role.DRAFTER)) for _ in range(MOST_JOINING + 5)]
    tasks.append(asyncio.create_task(connect(Role.VERIFIER)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert connecting.count(Role.DRAFTER) == MOST_JOINING and connecting.count(Role.VERIFIER) == 1
    answered.set()
    await asyncio.gather(*tasks)
    assert connecting.count(Role.DRAFTER) == MOST_JOINING + 5
    answered.clear()
    monkeypatch.setattr(discovery_module, "TURN_SECONDS", 0.0)
    tasks = [asyncio.create_task(connect(Role.DRAFTER)) for _ in range(2 * MOST_JOINING + 5)]
    await rig.until(lambda: connecting.count(Role.DRAFTER) == 3 * MOST_JOINING + 10)
    answered.set()
    await asyncio.gather(*tasks)
    assert discovery._turns[Role.DRAFTER]._value == MOST_JOINING


async def test_a_word_that_the_store_lost_is_said_again(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "REPEAT_SECONDS", 0.05)
    worker = await rig.worker(Role.VERIFIER, "v")
    said = asyncio.Event()

    async def lose(*word: Any) -> None:
        said.set()

    with monkeypatch.context() as losing:
        losing.setattr(rig.store, "answer", lose)
        worker.register(rig.address)
        await said.wait()
        assert worker.states.empty()
    assert (await worker.states.get())[0] is not None


async def test_a_mistake_of_the_routers_own_is_logged_and_the_worker_tried_again(
    rig: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = await rig.worker(Role.VERIFIER, "v")
    drafter = await rig.worker(Role.DRAFTER, "d", tokenizer="other")
    mistakes, compare = [RuntimeError("a mistake")], incompatibility

    def mistaken(newcomer: Registration, verifiers: Iterable[Registration]) -> str | None:
        if newcomer.key[0] is Role.DRAFTER and mistakes:
            raise mistakes.pop()
        return compare(newcomer, verifiers)

    monkeypatch.setattr(discovery_module, "incompatibility", mistaken)
    store, fleet = MemoryStore(ttl_seconds=1000), Fleet(Metrics(), clock=lambda: 1.0)
    recruiting = asyncio.create_task(WorkerDiscovery(store, fleet, rig.identity("another")).run())
    await store.beat(verifier.record())
    await rig.until(lambda: bool(fleet.verifiers))
    while not (refusal := (await store.beat(drafter.record())).refusal):
        await asyncio.wait((recruiting,), timeout=0.01)
    assert "its hash is other" in refusal
    assert "the router failed on drafter d; trying again" in caplog.text
    recruiting.cancel()
    await asyncio.gather(recruiting, return_exceptions=True)


async def test_a_verifier_that_says_what_cannot_be_is_given_up_and_tried_again(
    rig: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()

    class Recorded(Backoff):
        def after(self, lasted: float) -> float:
            pauses.append(super().after(lasted))
            return 0.001

    monkeypatch.setattr(discovery_module, "Backoff", Recorded)
    worker = await rig.verifier()
    for turn in range(3):
        await rig.until(lambda: "v" in rig.fleet.verifiers)
        worker.say(finished=[verifier_pb2.Finished(session_id=b"s" * 16, reason=77)])  # type: ignore[arg-type]
        await rig.until(lambda turn=turn: len(pauses) > turn)
    assert pauses == [0.1, 0.2, 0.4]  # that it is taken in each time does not make them begin anew
    assert (
        "verifier v is given up: what it says is not understood: there is no finish reason 77" in caplog.text
    )
