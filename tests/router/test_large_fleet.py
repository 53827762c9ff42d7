"""A fleet of many workers: how evenly sessions come to them, and how few of them are looked at for one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.net.heartbeat import IDLE_SILENCE_SECONDS, SILENCE_SECONDS, TICK_SECONDS
from outrider.sampling.params import SamplingParams
from outrider.store.memory import MemoryStore
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.drafter_sessions import DrafterEvents
from outrider.wire.hello import Identity, Role
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.session import SessionId, SessionParams
from outrider.wire.verifier_sessions import VerifierEvents
from router.compatibility import Registration, incompatibility
from router.drafter_choice import FEW, FEW_MODELS, NEIGHBOURS, Wanted
from router.drafter_merits import Outcome
from router.fleet import Fleet
from router.metrics import Metrics
from router.placement import DrafterCandidate, VerifierCandidate
from router.prefixes import MOST_HOLDERS
from router.requests import GenerationRequest
from router.transcript import Transcript
from router.worker_discovery import WorkerDiscovery
from router.workers import MOST_DRAFTERS, MOST_ROUND_TRIPS, Drafter, Verifier


class NoStream:
    """In the place of a channel, and of its calls: nobody is there."""

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return lambda *_, **__: self

    def cancel(self) -> None: ...

    def add_done_callback(self, _: object) -> None: ...


def registration(role: Role, number: int, **about: Any) -> Registration:
    identity = Identity(role, f"{role.name.lower()}-{number:04d}", 1, f"{role.name} model", "t")
    model = ModelInfo("m", identity.model_fingerprint, "Arch", 1, 100, 8192, (0,), "cpu", "float32", True)
    info = WorkerInfo(identity, replace(model, **about), 4096, 16)
    return Registration(
        info, f"10.0.{number // 8 % 256}.{number // 2048}:5000", TokenizerFiles("t", "{}", "")
    )


async def fleet_of(verifiers: int, drafters: int = 0, seed: int = 1) -> Fleet:
    fleet = Fleet(Metrics(), clock=lambda: 1.0, below=random.Random(seed).randrange)
    connection: Any = NoStream()
    for number in range(verifiers):
        fleet.add_verifier(Verifier(registration(Role.VERIFIER, number), connection, None))
    for number in range(drafters):
        fleet.add_drafter(Drafter(registration(Role.DRAFTER, number), connection, None))
    return fleet


def report(fleet: Fleet, running: Sequence[int]) -> None:
    for one, sessions in zip(fleet.verifiers.values(), running, strict=True):
        one._dispatch(VerifierEvents(load=VerifierLoad(running=sessions, kv_usage=0.3, price=0.1)))


class Placing:
    """Places sessions as a router does, each with a prompt of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._ids: Iterator[int] = iter(range(10**6))

    def place(self, prompt: Sequence[int] = (), owner: str = "") -> Verifier:
        number = next(self._ids)
        tokens = tuple(prompt) or tuple((number * 7919 + each) % 97 for each in range(64))
        params = SessionParams(tokens, SamplingParams(seed=1), 20)
        verifier = self.fleet.verifier_for(Transcript(GenerationRequest("m", params)))
        assert verifier is not None
        name, listener = SessionId(f"{owner:8}{number:08}".encode()), object()
        opened: Any = {"output": (), "num_speculative_tokens": 0, "draft_key": b"", "listener": listener}
        verifier.open(name, params, **opened)
        return verifier


@pytest.mark.parametrize("routers", [1, 2, 4, 10])
async def test_routers_do_not_herd_between_two_reports(routers: int) -> None:
    burst, verifiers, running = 100, 100, [20] * 100
    got: Counter[str] = Counter()
    placings = [Placing(await fleet_of(verifiers, seed=seed)) for seed in range(routers)]
    for one in placings:
        report(one.fleet, running)
    for number in range(burst):
        got[placings[number % routers].place().identity.worker_id] += 1
    assert max(got.values()) <= burst / verifiers + 4


async def test_routers_do_not_herd_where_one_verifier_is_emptier_than_all_others() -> None:
    placings = [Placing(await fleet_of(100, seed=seed)) for seed in range(10)]
    for one in placings:
        report(one.fleet, [20] * 99 + [0])
    got = Counter(placings[number % 10].place().identity.worker_id for number in range(100))
    assert 1 <= got["verifier-0099"] <= 20 and max(got.values()) <= 20


@pytest.mark.parametrize("running", [None, 20])
async def test_one_router_fills_a_fleet_evenly(running: int | None) -> None:
    """Without a word of the verifiers, and with a report to which it adds what it has placed since."""
    placing = Placing(await fleet_of(50))
    if running is not None:
        report(placing.fleet, [running] * 50)
    got = Counter(placing.place().identity.worker_id for _ in range(500))
    assert max(got.values()) - min(got.values()) <= 4


async def test_a_placement_looks_at_a_few_workers_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: Counter[str] = Counter()
    fleet = await fleet_of(300, 600)
    for kind in (VerifierCandidate, DrafterCandidate):

        def counted(*args: Any, kind: Any = kind, **fields: Any) -> Any:
            looked[kind.__name__] += 1
            return kind(*args, **fields)

        room = "fleet" if kind is VerifierCandidate else "drafter_choice"
        monkeypatch.setattr(f"router.{room}.{kind.__name__}", counted)
    placing = Placing(fleet)
    for _ in range(20):
        drafter = fleet.choice.drafter_for(Wanted(placing.place(), frozenset(), lambda *_: 0.7))
        assert drafter is not None
    assert looked["VerifierCandidate"] <= 20 * (FEW + MOST_HOLDERS)
    assert looked["DrafterCandidate"] <= 20 * (FEW + NEIGHBOURS + MOST_DRAFTERS)


async def test_where_no_drafter_pays_a_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, looked = await fleet_of(1, 600), []
    (verifier,) = fleet.verifiers.values()
    model, drafters = verifier.identity.model_fingerprint, list(fleet.drafters.values())
    for one in reversed(drafters):
        if one is drafters[0]:
            fleet.choice.merits.of("").tried(model, one.instance)  # then there is no other trial for a while
        for _ in range(40):
            fleet.choice.merits.of("").observe(model, one.instance, Outcome(1))

    def counted(*args: Any, **fields: Any) -> DrafterCandidate:
        looked.append(args[0])
        return DrafterCandidate(*args, **fields)

    monkeypatch.setattr("router.drafter_choice.DrafterCandidate", counted)
    found = [fleet.choice.drafter_for(Wanted(verifier, frozenset(), lambda *_: 0.7)) for _ in range(20)]
    assert found == [None] * 20
    assert len(looked) <= 20 * (FEW + NEIGHBOURS + MOST_DRAFTERS)


async def test_a_prompt_goes_where_its_like_went_before_among_many() -> None:
    placing, prompt = Placing(await fleet_of(500)), range(512)
    held = placing.place(prompt)
    for _ in range(20):
        placing.place()
    assert placing.place(prompt) is held


async def test_all_are_looked_at_where_the_few_do_not_suit() -> None:
    fleet = await fleet_of(200)
    report(fleet, [20] * 200)
    waiting = VerifierEvents(load=VerifierLoad(running=20, waiting=1))
    for one in list(fleet.verifiers.values())[:-1]:
        one._dispatch(waiting)
    placing = Placing(fleet)
    assert {placing.place().identity.worker_id for _ in range(5)} == {"verifier-0199"}


async def test_where_sessions_wait_is_known_without_looking_at_all() -> None:
    fleet = await fleet_of(50)
    heard: list[Verifier] = []
    fleet.on_verifier_load.append(heard.append)
    first, second, *_ = fleet.verifiers.values()
    first._dispatch(VerifierEvents(load=VerifierLoad(waiting=2)))
    assert list(fleet.waiting) == [first]
    first._dispatch(VerifierEvents(load=VerifierLoad()))
    assert not fleet.waiting
    second._dispatch(VerifierEvents(load=VerifierLoad(waiting=2)))
    fleet.remove(second)
    second._dispatch(VerifierEvents(load=VerifierLoad(waiting=2)))
    assert not fleet.waiting and heard == [first, first, second]


async def test_a_rare_draft_model_that_is_better_is_found_among_many() -> None:
    fleet = await fleet_of(1, 500)
    connection: Any = NoStream()
    better = registration(Role.DRAFTER, 999)
    identity = replace(better.info.identity, model_fingerprint="better")
    fleet.add_drafter(
        Drafter(replace(better, info=replace(better.info, identity=identity)), connection, None)
    )
    for one in fleet.drafters.values():
        one._dispatch(DrafterEvents(load=DrafterLoad(token_seconds=0.01)))
    (verifier,) = fleet.verifiers.values()
    acceptance = {"better": 0.9, "DRAFTER model": 0.5}
    drafter = fleet.choice.drafter_for(Wanted(verifier, frozenset(), lambda _, draft: acceptance[draft]))
    assert drafter is not None and drafter.identity.worker_id == "drafter-0999"


async def test_a_drafter_is_found_where_nearly_all_gave_the_session_up() -> None:
    fleet = await fleet_of(1, 100)
    (verifier,) = fleet.verifiers.values()
    gave_up = frozenset(one.instance for one in list(fleet.drafters.values())[:-1])
    drafter = fleet.choice.drafter_for(Wanted(verifier, gave_up, lambda *_: 0.7))
    assert drafter is not None and drafter.identity.worker_id == "drafter-0099"
    assert fleet.choice.drafter_for(Wanted(verifier, gave_up | {drafter.instance}, lambda *_: 0.7)) is None


async def test_what_an_own_report_says_of_drafters_does_not_count_twice() -> None:
    fleet = await fleet_of(1, 1)
    (drafter,) = fleet.drafters.values()
    drafter._opened(SessionId(b"x" * 16), object())  # type: ignore[arg-type]
    assert drafter.unreported == 1
    drafter._dispatch(DrafterEvents(load=DrafterLoad(sessions=1)))
    assert drafter.unreported == 0


async def test_more_draft_models_than_are_looked_at_cost_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await fleet_of(1)
    connection: Any = NoStream()
    for number in range(3 * FEW_MODELS):
        one = registration(Role.DRAFTER, number)
        identity = replace(one.info.identity, model_fingerprint=f"draft {number}")
        fleet.add_drafter(Drafter(replace(one, info=replace(one.info, identity=identity)), connection, None))
    asked: list[str] = []
    (verifier,) = fleet.verifiers.values()

    def acceptance(_: str, draft: str) -> float:
        asked.append(draft)
        return 0.7

    assert fleet.choice.drafter_for(Wanted(verifier, frozenset(), acceptance)) is not None
    assert len(asked) <= FEW_MODELS + NEIGHBOURS


async def test_joining_compares_by_models_and_not_by_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each newcomer is compared with the models that are served, and who comes before them once more."""
    fleet = await fleet_of(0)
    discovery = WorkerDiscovery(MemoryStore(), fleet, Identity(Role.ROUTER, "router", 1))
    compared: list[Registration] = []

    def counted(newcomer: Registration, verifiers: Iterable[Registration]) -> str | None:
        others = list(verifiers)
        compared.extend(others)
        return incompatibility(newcomer, others)

    monkeypatch.setattr("router.worker_discovery.incompatibility", counted)
    connection: Any = NoStream()
    verifiers = [Verifier(registration(Role.VERIFIER, number), connection, None) for number in range(100)]
    drafters = [Drafter(registration(Role.DRAFTER, number), connection, None) for number in range(400)]
    for worker in [*drafters[:200], *verifiers, *drafters[200:]]:
        discovery._admit(worker)
    assert len(fleet.verifiers) == 100 and len(fleet.drafters) == 400
    assert all(one.verdict.done() and one.verdict.result() is None for one in drafters)
    assert len(compared) <= len(verifiers) + len(drafters)


async def test_a_worker_may_be_silent_for_longer_where_no_session_is() -> None:
    fleet = await fleet_of(1)
    (verifier,) = fleet.verifiers.values()

    def ticks() -> int:
        """Returns how many it outlives from now on."""
        count = 0
        while not verifier._given_up:
            verifier.tick()
            count += 1
        verifier._given_up = ""
        return count

    assert ticks() == IDLE_SILENCE_SECONDS / TICK_SECONDS
    verifier._silence.moved()
    for _ in range(10):
        verifier.tick()
    verifier._opened(SessionId(b"x" * 16), object())  # type: ignore[arg-type]
    assert ticks() == SILENCE_SECONDS / TICK_SECONDS, "it had been silent while it had little to say"


async def test_round_trips_that_a_drafter_told_before_are_still_known_and_but_so_many() -> None:
    fleet = await fleet_of(0, 1)
    (drafter,) = fleet.drafters.values()
    for first in range(0, MOST_ROUND_TRIPS + 2, 3):
        told = {f"v:{number}": float(number) for number in range(first, first + 3)}
        drafter._dispatch(DrafterEvents(load=DrafterLoad(round_trips=told)))
    assert len(drafter.load.round_trips) == MOST_ROUND_TRIPS
    assert "v:1" not in drafter.load.round_trips and drafter.load.round_trips["v:2"] == 2.0
