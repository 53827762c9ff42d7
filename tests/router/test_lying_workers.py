"""What workers may say and must not be believed: scripted ones, over real loopback gRPC."""

from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.v1 import verifier_pb2
from router.metrics import MOST_REASONS
from tests.router.asking import Running, committed, finished, request

LARGEST = 2**32 - 1


@pytest.mark.parametrize(
    "said",
    [
        {"tokens": [10] * 51},  # of 50
        {"tokens": [100]},  # of a vocabulary of 100
        {"tokens": [LARGEST]},
        {"tokens": [10], "verified": LARGEST},  # its sums are told as 32 bits
    ],
)
async def test_tokens_that_no_sound_verifier_commits_end_the_session_alone(rig: Any, said: Any) -> None:
    verifier = await rig.verifier()
    running, other = Running(rig, request()), Running(rig, request())
    sid, untouched = [(await verifier.next_command("open")).session_id for _ in range(2)]
    verifier.say(committed=[verifier_pb2.Committed(session_id=sid, base=3, **said)])
    with pytest.raises(OutriderError, match="lost track of this request"):
        await running.task
    assert running.events == []
    verifier.say(**committed(untouched, 3, 3), **finished(untouched))
    assert len(await other.task) == 2


async def test_an_end_without_a_reason_is_none(rig: Any) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request())
    sid = (await verifier.next_command("open")).session_id
    verifier.say(**committed(sid, 3, 10), **finished(sid, verifier_pb2.FINISH_REASON_UNSPECIFIED))
    with pytest.raises(OutriderError, match="lost track of this request"):
        await running.task


async def test_a_verifier_that_gives_all_back_and_claims_to_idle_does_not_get_them_again(rig: Any) -> None:
    sick = await rig.verifier("a")
    running = Running(rig, request())
    sid = (await sick.next_command("open")).session_id
    sound = await rig.verifier("b")
    sound.say(load=verifier_pb2.VerifierLoad(running=3))  # the other idles, and so is chosen again
    await rig.until(lambda: rig.fleet.verifiers["b"].load.running == 3)
    sick.say(failed=[verifier_pb2.Failed(session_id=sid, code=14, message="not here")])
    assert (await sound.next_command("open")).session_id == sid
    sound.say(**committed(sid, 3, 3), **finished(sid))
    assert len(await running.task) == 2


async def test_a_verifier_does_not_fill_the_metrics(rig: Any) -> None:
    verifier = await rig.verifier()
    verifier.say(dropped={f"reason {number}": 1 for number in range(1000)})
    await rig.until(lambda: b"outrider_drafts_dropped_total{" in rig.metrics.exposition())
    assert rig.metrics.exposition().count(b"outrider_drafts_dropped_total{") <= MOST_REASONS
