"""What is told of the live service: workers as they come and go, and of sessions only the owner's."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from outrider.v1 import drafter_pb2, verifier_pb2
from router.live import MOST_POSITIONS, positions, service, sessions_of
from tests.router.asking import Running, committed, request


def told(rig: Any) -> Any:
    """As it is sent: it must be JSON."""
    return json.loads(json.dumps(service(rig.fleet, rig.sessions.open)))


async def test_workers_as_they_say_that_they_are_until_they_leave(rig: Any) -> None:
    assert told(rig)["counts"] == {"verifiers": 0, "drafters": 0, "sessions": 0}
    verifier, drafter = await rig.verifier(), await rig.drafter()
    load = drafter_pb2.DrafterLoad(token_seconds=0.25, round_trip_seconds=0.5)
    load.round_trips[verifier.address] = 0.5
    load.round_trips["elsewhere:1"] = 1.0
    drafter.say(load=load)
    verifier.say(load=verifier_pb2.VerifierLoad(kv_usage=0.5, price=0.125, step_seconds=0.25, step_tokens=7))
    await rig.until(lambda: bool(rig.fleet.drafters["d"].load.round_trips))
    await rig.until(lambda: rig.fleet.verifiers["v"].load.step_tokens == 7)
    now = told(rig)
    (one,) = now["verifiers"]
    assert (one["id"], one["kv_usage"], one["price"], one["step_seconds"]) == ("v", 0.5, 0.125, 0.25)
    (one,) = now["drafters"]
    assert (one["id"], one["token_seconds"]) == ("d", 0.25)
    assert one["round_trips"] == [{"verifier": "v", "seconds": 0.5}], "an address is nobody's name"
    await drafter.stop()
    await rig.until(lambda: not told(rig)["drafters"])


async def test_who_drafts_for_whom_and_whose_session_it_is(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    asked = [request(max_tokens=500, owner=owner) for owner in ("alice", "bob", "alice")]
    running = [Running(rig, one) for one in asked]
    opened = [await verifier.next_command("open") for _ in running]
    for one in opened:
        await drafter.next_command("open")
        verifier.say(**committed(one.session_id, 3, 20, 21, accepted=1, verified=2))
    await rig.until(lambda: all(one.events for one in running))
    now = told(rig)
    assert now["counts"]["sessions"] == 3
    assert now["pairs"] == [{"verifier": "v", "drafter": "d", "sessions": 3}]
    assert now["sources"] == [{"source": "m", "verified": 6, "accepted": 3}]
    mine = sessions_of("alice", rig.sessions.open)
    assert [one["id"] for one in mine] == [opened[2].session_id.hex(), opened[0].session_id.hex()]
    assert {(one["verifier"], one["drafters"], one["k"], one["tokens"]) for one in mine} == {
        ("v", ("d",), 8, 2)
    }
    assert len(sessions_of("bob", rig.sessions.open)) == 1 and not sessions_of("", rig.sessions.open)
    secret = opened[1].session_id.hex()
    assert secret not in json.dumps([now, mine])
    await drafter.stop()
    await rig.until(lambda: told(rig)["pairs"] == [{"verifier": "v", "drafter": "", "sessions": 3}])
    for one in running:
        one.task.cancel()


async def test_why_a_session_has_no_drafts(rig: Any) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request(max_tokens=500, owner="alice"))
    plain = Running(rig, request(max_tokens=500, owner="bob", num_speculative_tokens=0))
    opened = [await verifier.next_command("open") for _ in range(2)]

    def why(owner: str = "alice") -> str:
        (one,) = sessions_of(owner, rig.sessions.open)
        told: str = json.loads(json.dumps(one))["undrafted"]
        return told

    assert (why(), why("bob")) == ("no_drafter", "unwanted")
    drafter = await rig.drafter()
    (sid,) = {(await drafter.next_command("open")).session_id} & {one.session_id for one in opened}
    await rig.until(lambda: why() == "")
    verifier.say(load=verifier_pb2.VerifierLoad(drafts_rest=True))
    await rig.until(lambda: why() == "rest")
    verifier.say(load=verifier_pb2.VerifierLoad(price=100.0), **committed(sid, 3, 20, accepted=0, verified=0))
    await rig.until(lambda: why() == "price")
    drafter.say(ended=[drafter_pb2.DraftEnded(session_id=sid, reason="out of memory")])
    await rig.until(lambda: why() == "none_chosen")
    for one in (running, plain):
        one.task.cancel()


def test_what_becomes_of_drafts_by_position() -> None:
    assert positions({}, {}) == []
    found = positions(Counter({1: 2, 3: 4}), Counter({0: 3, 1: 2, 3: 1}))
    assert found == [
        {"verified": 6, "accepted": 3},
        {"verified": 4, "accepted": 1},
        {"verified": 4, "accepted": 1},
    ]
    assert len(positions({1000: 1}, {0: 1})) == MOST_POSITIONS
