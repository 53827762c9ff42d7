"""A worker that says more than it may: it is cut off for a while, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.v1 import common_pb2, drafter_pb2, verifier_pb2
from outrider.wire.drafter_sessions import MAX_EVENTS_BYTES
from outrider.wire.verifier_sessions import ENTRY_NUMBERS, MOST_ENTRIES
from router import worker_discovery as discovery_module
from router import workers as workers_module
from tests.router.asking import Running, committed, finished, request
from tests.router.conftest import Rig, Worker


def cut_off(rig: Rig) -> float | None:
    return rig.metrics.registry.get_sample_value("outrider_workers_cut_off_total", {"role": "drafter"})


def flood(count: int) -> drafter_pb2.DrafterEvents:
    """Returns so many empty entries. To be made before the drafter joins: millions take seconds in which
    nothing else runs here, and a router takes who says nothing for dead."""
    return drafter_pb2.DrafterEvents(ended=[drafter_pb2.DraftEnded()] * count)


async def until_cut_off(rig: Rig, drafter: Worker, why: str) -> None:
    await rig.until(lambda: cut_off(rig) == 1 and not rig.fleet.drafters)
    while why not in (said := (await drafter.states.get())[1]):
        pass
    assert "the drafter is cut off for 60 seconds" in said


async def test_empty_entries_by_the_million_are_not_even_decoded(rig: Rig) -> None:
    """Two bytes each: of 16 MiB the router made 1.1 GB."""
    told = flood(MAX_EVENTS_BYTES // 2 + 1)
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    await drafter.next_command("open")
    assert drafter.events.put(told)
    await until_cut_off(rig, drafter, "a message is over the limit")
    verifier.say(**committed(opened.session_id, 3, 3))
    verifier.say(**finished(opened.session_id))
    await running.task  # it goes on plainly
    assert list(rig.fleet.verifiers) == ["v"]


async def test_many_entries_in_small_messages_are_too_many(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "BYTES_PER_SECOND", 1e-9)
    _, drafter = await rig.verifier(), await rig.drafter()
    for _ in range(30):
        assert drafter.events.put(flood(1000))
    await until_cut_off(rig, drafter, "it says more than")


async def test_messages_count_however_short(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "BYTES_PER_SECOND", 1e-9)
    _, drafter = await rig.verifier(), await rig.drafter()
    for _ in range(workers_module.BURST_BYTES // workers_module.MESSAGE_UNITS):
        assert drafter.events.put(drafter_pb2.DrafterEvents())
    await until_cut_off(rig, drafter, "it says more than")


async def test_it_is_let_in_again_after_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "CUT_OFF_SECONDS", 0.1)
    told = flood(MAX_EVENTS_BYTES)
    _, drafter = await rig.verifier(), await rig.drafter()
    former = rig.fleet.drafters["d"]
    assert drafter.events.put(told)
    await rig.until(lambda: cut_off(rig) == 1)
    await rig.until(lambda: rig.fleet.drafters.get("d") not in (None, former))


def verifiers_cut_off(rig: Rig) -> float | None:
    return rig.metrics.registry.get_sample_value("outrider_workers_cut_off_total", {"role": "verifier"})


@pytest.mark.parametrize(
    "told",
    [
        {"committed": [verifier_pb2.Committed()] * (MOST_ENTRIES + 1)},
        {"failed": [verifier_pb2.Failed()] * (MOST_ENTRIES + 1)},
        {"committed": [verifier_pb2.Committed(guesses=[common_pb2.Guess()] * (MOST_ENTRIES + 1))]},
        {"committed": [verifier_pb2.Committed(tokens=[10] * (ENTRY_NUMBERS * (MOST_ENTRIES + 1)))]},
    ],
)
async def test_a_verifiers_message_of_too_many_entries_is_not_decoded(rig: Rig, told: Any) -> None:
    """Of 400,000, which are 800 KB, the router made objects for 1.8 s, in which nothing else ran."""
    events = verifier_pb2.VerifierEvents(**told)
    verifier = await rig.verifier()
    assert verifier.events.put(events)
    await rig.until(lambda: verifiers_cut_off(rig) == 1 and not rig.fleet.verifiers)


@pytest.mark.parametrize("of_session", [False, True])
async def test_entries_that_bring_no_session_tokens_are_rationed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, of_session: bool
) -> None:
    monkeypatch.setattr(workers_module, "VERIFIER_BYTES", (1e-9, 2**20))
    verifier = await rig.verifier("cut off")
    running = Running(rig, request())
    opened = (await verifier.next_command("open")).session_id
    verifier.say(**committed(opened, 3, 10))
    same = committed(opened, 3, 10) if of_session else committed(b"s" * 16, 3, 10)
    verifier.say(committed=same["committed"] * 2**12)  # of which none is news
    await rig.until(lambda: verifiers_cut_off(rig) == 1)
    sound = await rig.verifier("sound")
    assert (await sound.next_command("open")).output == [10]
    sound.say(**committed(opened, 4, 3), **finished(opened))
    assert len(await running.task) == 3


async def test_what_brings_sessions_their_tokens_is_not_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "VERIFIER_ENTRY_UNITS", 2**40)
    verifier = await rig.verifier()
    running = Running(rig, request())
    opened = (await verifier.next_command("open")).session_id
    for position in range(3, 13):
        verifier.say(**committed(opened, position, 10))
    verifier.say(**committed(opened, 13, 3))
    await rig.until(lambda: len(running.events) == 11)
    assert verifiers_cut_off(rig) is None
    running.task.cancel()
