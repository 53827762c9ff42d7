"""Sessions that may have several drafters at a time, on scripted workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.net.draft_right import right
from outrider.v1 import drafter_pb2, verifier_pb2
from router.live import service, sessions_of
from tests.router.asking import Running, committed, finished, request


def step(session_id: bytes, base: int, *drafters: Sequence[int]) -> dict[str, Any]:
    """A step that accepted two draft tokens of three. `drafters`: turn, verified, accepted, alone."""
    said = committed(session_id, base, 10, 11, 12, accepted=2, verified=3)
    for turn, verified, accepted, alone in drafters:
        said["committed"][0].drafters.add(turn=turn, verified=verified, accepted=accepted, alone=alone)
    return said


async def test_each_drafter_has_a_seat_and_a_turn_and_what_became_of_its_guesses_is_told(rig: Any) -> None:
    rig.sessions._drafters_per_session = 2
    verifier = await rig.verifier()
    alike = {"fingerprint": "one", "model": "one"}
    first, twin = await rig.drafter("a", **alike), await rig.drafter("b", **alike)
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    sid, key = opened.session_id, opened.draft_key
    assert (await first.next_command("open")).draft_key == right(key, 0, seat=0)
    second = await rig.drafter("c", fingerprint="two", model="two")
    assert (await second.next_command("open")).draft_key == right(key, 1, seat=1)
    assert twin.commands.empty(), "two of one model say the same"
    verifier.say(**step(sid, 3, (0, 3, 1, 2), (1, 2, 2, 1), (7, 3, 2, 0)))  # who has turn 7 is not known
    await rig.until(lambda: len(running.events) == 1)
    told = running.events[0].drafters
    assert [(one.name, one.verified, one.accepted) for one in told] == [("one", 3, 1), ("two", 2, 2)]
    assert service(rig.fleet, rig.sessions.open)["sources"] == [
        {"source": "one", "verified": 3, "accepted": 1},
        {"source": "two", "verified": 2, "accepted": 2},
    ]
    (mine,) = sessions_of("", rig.sessions.open)
    assert mine["drafters"] == ("a", "c")
    counted = rig.metrics.exposition().decode()
    assert 'outrider_draft_tokens_total{fate="rejected",model_name="m",source="one"} 2.0' in counted
    cut = verifier_pb2.DrafterCutOff(session_id=sid, turn=1, reason="bad_token")
    verifier.say(cut_off=[cut])
    assert (await second.next_command("close")).session_id == sid
    third = await rig.drafter("d", fingerprint="three", model="three")
    assert (await third.next_command("open")).draft_key == right(key, 2, seat=1)
    await first.stop()
    again = await twin.next_command("open")
    assert again.draft_key == right(key, 3, seat=0) and list(again.output) == [10, 11, 12]
    verifier.say(**step(sid, 6, (2, 3, 2, 3)), **finished(sid, verifier_pb2.FINISH_REASON_LENGTH))
    for one in (third, twin):
        assert (await one.next_command("close")).session_id == sid
    running.task.cancel()


async def test_a_verifier_that_counts_more_than_it_verified_is_left(rig: Any) -> None:
    verifier, other = await rig.verifier("v1"), await rig.verifier("v2")
    running = Running(rig, request())
    session_id = (await verifier.next_command("open")).session_id
    verifier.say(**step(session_id, 3, (0, 4, 1, 0)))
    assert (await other.next_command("open")).session_id == session_id
    assert not running.events
    running.task.cancel()


async def test_windows_are_by_each_drafters_pace(rig: Any) -> None:
    rig.sessions._drafters_per_session = 2
    verifier = await rig.verifier()
    slow, quick = await rig.drafter("a", fingerprint="one"), await rig.drafter("b", fingerprint="two")
    slow.say(load=drafter_pb2.DrafterLoad(token_seconds=0.1))
    quick.say(load=drafter_pb2.DrafterLoad(token_seconds=0.001))
    await rig.until(lambda: all(one.load.token_seconds for one in rig.fleet.drafters.values()))
    verifier.say(load=verifier_pb2.VerifierLoad(typical_step_seconds=0.1))
    await rig.until(lambda: rig.fleet.verifiers["v"].load.typical_step_seconds > 0)
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    k = opened.num_speculative_tokens
    windows = [(await one.next_command("open")).window for one in (slow, quick)]
    assert windows[0] == k + 1 < windows[1]
    running.task.cancel()
