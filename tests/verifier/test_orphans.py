"""Sessions whose router's stream broke: how long they are kept, and who gets them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from outrider.engine.kv_blocks import BlockPool
from outrider.engine.scheduler import Grant, Schedule
from outrider.errors import Unavailable
from outrider.net.heartbeat import IDLE_HEARTBEATS
from outrider.sampling.params import SamplingParams
from outrider.v1 import verifier_pb2
from outrider.wire.codec import sampling_to_wire
from outrider.wire.session import FinishReason, SessionParams
from tests.verifier.talk import (
    Running,
    Talk,
    attach,
    drafter,
    failure,
    open_session,
    output,
    router,
)
from verifier import orphans as orphans_module
from verifier.orphans import Orphans, dispensable
from verifier.running import Running as RunningSession
from verifier.session import Session, SessionSpec

ID = b"s" * 16
LENGTH = 600


def session(number: int, prompt: int = 3, orphaned: bool = False, blocks: int = 1) -> RunningSession:
    greedy = SamplingParams(temperature=0.0)
    spec = SessionSpec(bytes([number]) * 16, SessionParams((5,) * prompt, greedy, 8), (), 199, b"")
    running = RunningSession(Session(spec, 4), None, orphaned=orphaned)
    running.table.blocks = list(range(blocks))
    return running


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_they_are_kept_for_the_grace_time_each() -> None:
    clock = Clock()
    orphans = Orphans(clock, grace_seconds=5.0)
    first, second = session(1), session(2)
    orphans.add(first)
    clock.now = 3.0
    orphans.add(second)
    assert orphans.lapsed() == []
    clock.now = 5.0
    assert orphans.lapsed() == [first.id]
    orphans.forget(first.id)
    clock.now = 8.0
    assert orphans.lapsed() == [second.id]


def test_only_so_many_ends_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans_module, "MOST_FINISHED", 2)
    orphans = Orphans(Clock())
    several = [session(number) for number in range(3)]
    for running in several:
        orphans.finish(running, FinishReason.LENGTH)
    assert [orphans.finished(running.id) is not None for running in several] == [False, True, True]


def test_the_youngest_orphan_goes_where_another_session_is_short_of_blocks() -> None:
    old, young, own = session(1, orphaned=True), session(2, orphaned=True), session(3)
    waits = session(4, prompt=40, blocks=0)
    everyone = [old, young, own, waits]
    runs = tuple(Grant(index, 1, 0) for index in range(3))
    assert dispensable(everyone, Schedule(preempt=2), BlockPool(0)) is young
    assert (
        dispensable(everyone, Schedule(runs), BlockPool(5)) is young
    )  # 41 tokens take three, and three may grow
    assert (
        dispensable(everyone, Schedule(runs), BlockPool(6)) is None
    )  # it waits for its turn in a step, not for blocks
    shared = BlockPool(6)
    table = shared.open([])
    shared.extend(table, 16)
    assert dispensable(everyone, Schedule(runs), shared) is young
    shared.seal(table, waits.session.log[:16])
    assert (
        dispensable(everyone, Schedule(runs), shared) is None
    )  # the block that is held is of its own prompt
    assert len(waits.digests) == 2, "which is hashed once, not at every step"
    assert dispensable([old, young, own], Schedule(runs), BlockPool(0)) is None
    assert dispensable([own, waits], Schedule(preempt=0), BlockPool(0)) is None
    waits.orphaned = True
    assert dispensable([own, waits], Schedule((Grant(0, 1, 0),)), BlockPool(0)) is None  # only itself


async def expected(verifier: Running, **changed: Any) -> list[int]:
    """The tokens of the session, undisturbed."""
    talk = await router(verifier)
    talk.say(open_session(b"r" * 16, max_tokens=LENGTH, **changed))
    tokens = await output(talk, b"r" * 16)
    talk.call.cancel()
    return tokens


async def begin(verifier: Running, talk: Talk, count: int = 20, **changed: Any) -> list[int]:
    """Opens the session and hears at least so many of its tokens."""
    talk.say(open_session(ID, max_tokens=LENGTH, **changed))
    tokens: list[int] = []
    while len(tokens) < count:
        for step in (await talk.hear()).committed:
            tokens += step.tokens
    return tokens


async def broken_off(verifier: Running, talk: Talk) -> None:
    """The stream of a router breaks, and the verifier has noticed."""
    talk.call.cancel()
    async with asyncio.timeout(120):
        while ID in verifier.service.routers._owners:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Computed:
    """Counts the tokens that go through the model."""

    def __init__(self, verifier: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        engine = verifier.stepper._engine
        prepare = engine.prepare

        def count(works: Any) -> Any:
            self.tokens += sum(len(work.tokens) for work in works)
            return prepare(works)

        monkeypatch.setattr(engine, "prepare", count)


async def test_a_router_that_returns_goes_on_and_nothing_is_computed_again(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = await expected(verifier)
    computed = Computed(verifier, monkeypatch)
    talk = await router(verifier)
    known = await begin(verifier, talk)
    await broken_off(verifier, talk)
    running = verifier.stepper.get(ID)
    assert running is not None and running.orphaned
    length = len(running.session.log)
    async with asyncio.timeout(120):
        while len(running.session.log) == length:  # noqa: ASYNC110 (it runs on)
            await asyncio.sleep(0.005)
    returned = await router(verifier)
    returned.say(open_session(ID, max_tokens=LENGTH, output=known))
    tokens = known + await output(returned, ID)
    assert tokens == reference
    # The prompt's three tokens and every output token but the last, once each, unless found in the cache.
    assert computed.tokens <= 3 + LENGTH - 1


async def test_it_is_told_at_once_what_it_has_missed(verifier: Running) -> None:
    talk = await router(verifier)
    known = await begin(verifier, talk)
    await broken_off(verifier, talk)
    running = verifier.stepper.get(ID)
    assert running is not None
    returned = await router(verifier)
    returned.say(open_session(ID, max_tokens=LENGTH, output=known[:5]))
    while not (events := await returned.hear()).committed:
        pass
    first = events.committed[0]
    assert first.base == 3 + 5
    assert list(first.tokens)[: len(known) - 5] == known[5:]
    assert verifier.stepper.get(ID) is running


async def test_the_end_is_told_to_a_router_that_returns_after_it(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = await expected(verifier)
    talk = await router(verifier)
    known = await begin(verifier, talk)
    await broken_off(verifier, talk)
    async with asyncio.timeout(120):
        await verifier.stepper.until_empty()
    computed = Computed(verifier, monkeypatch)
    returned = await router(verifier)
    returned.say(open_session(ID, max_tokens=LENGTH, output=known))
    assert known + await output(returned, ID) == reference
    assert computed.tokens == 0 and verifier.stepper.get(ID) is None  # it was not opened again
    again = await router(verifier)
    again.say(open_session(ID, max_tokens=LENGTH, output=known))
    assert known + await output(again, ID) == reference  # that end was forgotten once it was told


async def test_nobody_comes_back_and_it_is_closed(verifier: Running) -> None:
    routers, clock = verifier.service.routers, Clock()
    routers._orphans = Orphans(clock, grace_seconds=5.0)
    talk, other = await router(verifier), await router(verifier)
    await begin(verifier, talk)
    await broken_off(verifier, talk)
    clock.now = 4.9
    routers.beat()
    assert verifier.stepper.get(ID) is not None
    clock.now = 5.0
    routers.beat()
    assert verifier.stepper.get(ID) is None
    while (await other.hear()).load.kv_usage > 0:  # which a sign of life tells
        for _ in range(IDLE_HEARTBEATS):
            routers.beat()
    assert ID not in routers._orphans


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": [5, 6, 8]},
        {"sampling": sampling_to_wire(SamplingParams(temperature=1.0, seed=3))},
        {"max_tokens": LENGTH - 1},
        {"stop_token_ids": [198]},
        {"output": [1, 2, 3]},
    ],
    ids=lambda changed: next(iter(changed)),
)
async def test_another_request_or_another_log_is_a_session_of_its_own(
    verifier: Running, changed: dict[str, Any]
) -> None:
    talk = await router(verifier)
    known = await begin(verifier, talk)
    assert known[:3] != [1, 2, 3]
    await broken_off(verifier, talk)
    former = verifier.stepper.get(ID)
    returned = await router(verifier)
    fields: dict[str, Any] = {"max_tokens": LENGTH, "output": known, **changed}
    returned.say(open_session(ID, **fields))
    told = await output(returned, ID)
    whole = len(told) == fields["max_tokens"] - len(fields["output"])
    assert whole or told[-1] in fields["stop_token_ids"]
    assert former is not None and former.orphaned  # nobody adopted it
    assert verifier.stepper.load.kv_usage == 0


async def test_the_router_that_opens_a_session_last_has_it_and_the_former_hears_so(verifier: Running) -> None:
    reference = await expected(verifier)
    former, last = await router(verifier), await router(verifier)
    known = await begin(verifier, former)
    last.say(open_session(ID, max_tokens=LENGTH, output=known[:3]))
    failed = await failure(former)
    assert (failed.session_id, failed.code) == (ID, grpc.StatusCode.ABORTED.value[0])
    close = verifier_pb2.VerifierCommand(close=verifier_pb2.CloseSession(session_id=ID))
    former.say(close)  # which has crossed that: not its own any more
    assert known[:3] + await output(last, ID) == reference


async def test_a_drafter_goes_on_with_the_right_that_the_new_router_gave(verifier: Running) -> None:
    talk, drafting = await router(verifier), await drafter(verifier)
    known = await begin(verifier, talk)
    drafting.say(attach(ID))
    assert (await drafting.hear()).commits
    await broken_off(verifier, talk)
    drafting.say(attach(ID, b"n" * 16))  # the drafter hears from the new router first
    late, returned = await drafter(verifier), await router(verifier)
    late.say(attach(b"t" * 16, b"n" * 16))
    returned.say(open_session(b"t" * 16, draft_key=b"n" * 16))
    await late.hear()
    returned.say(open_session(ID, max_tokens=LENGTH, output=known, draft_key=b"n" * 16))
    while not (await returned.hear()).committed:
        pass
    running = verifier.stepper.get(ID)
    assert running is not None and running.drafted
    assert running.seats[0].acknowledged is not None


async def test_the_former_drafter_has_lost_the_right_that_the_new_router_gave_anew(verifier: Running) -> None:
    talk, drafting = await router(verifier), await drafter(verifier)
    known = await begin(verifier, talk)
    drafting.say(attach(ID))
    assert (await drafting.hear()).commits
    await broken_off(verifier, talk)
    returned = await router(verifier)
    returned.say(open_session(ID, max_tokens=LENGTH, output=known, draft_key=b"n" * 16))
    while not (await returned.hear()).committed:
        pass
    running = verifier.stepper.get(ID)
    assert running is not None and not running.drafted
    drafting.say(verifier_pb2.DraftBatch(drafts=[verifier_pb2.Draft(session_id=ID, base=3, tokens=[1])]))
    dropped = verifier.service.drafters.dropped
    while not dropped:
        await returned.hear()
    assert set(dropped) == {"not_attached"}


async def test_an_orphan_gives_its_blocks_to_a_session_that_has_a_router(verifier: Running) -> None:
    pool = verifier.stepper._engine.pool
    talk = await router(verifier)
    await begin(verifier, talk)
    await broken_off(verifier, talk)
    orphan = verifier.stepper.get(ID)
    assert orphan is not None
    other = await router(verifier)
    held = pool.open([])
    pool.extend(held, (pool.available - 63) * 16)  # hardly more than the prompt needs
    other.say(open_session(b"t" * 16, prompt=[7] * 1000, max_tokens=4))
    assert len(await output(other, b"t" * 16)) == 4
    pool.close(held)
    assert verifier.stepper.get(ID) is None and orphan.session.room > 0


async def test_a_cancelled_orphan_is_closed_and_stays_so(verifier: Running) -> None:
    talk, other = await router(verifier), await router(verifier)
    known = await begin(verifier, talk)
    await broken_off(verifier, talk)
    other.say(verifier_pb2.VerifierCommand(cancel=verifier_pb2.CloseSession(session_id=ID)))
    other.say(open_session(ID, max_tokens=LENGTH, output=known))
    assert (await failure(other)).code == grpc.StatusCode.CANCELLED.value[0]
    assert verifier.stepper.load.running == 0


async def test_a_close_is_for_a_session_of_ones_own(verifier: Running) -> None:
    talk, other = await router(verifier), await router(verifier)
    await begin(verifier, talk)
    await broken_off(verifier, talk)
    other.say(verifier_pb2.VerifierCommand(close=verifier_pb2.CloseSession(session_id=ID)))
    other.say(open_session(b"too short"))
    await failure(other)  # so the close has been read
    assert ID in verifier.service.routers._orphans


async def test_a_verifier_whose_step_hangs_keeps_no_orphans(verifier: Running) -> None:
    talk = await router(verifier)
    await begin(verifier, talk)
    await broken_off(verifier, talk)
    verifier.service.routers.turn_away(Unavailable("a step does not end"))
    assert verifier.stepper.get(ID) is None


async def test_a_verifier_that_leaves_keeps_no_orphans(verifier: Running) -> None:
    talk, other = await router(verifier), await router(verifier)
    await begin(verifier, talk)
    await broken_off(verifier, talk)
    verifier.service.drain()
    assert verifier.stepper.get(ID) is None
    other.call.cancel()
    async with asyncio.timeout(120):
        await verifier.service.until_idle()
