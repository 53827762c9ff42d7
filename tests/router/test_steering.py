"""k and window of sessions on scripted workers, over real loopback gRPC."""

import asyncio
from typing import Any

import pytest

from outrider.v1 import drafter_pb2, verifier_pb2
from router.speculation import MARGIN, Estimator
from tests.router.asking import Running, committed, finished, first_step, request


@pytest.mark.parametrize(("asked", "k"), [(3, 3), (8, 8), (100, 8), (None, 8)])
async def test_a_request_sets_its_own_k_within_the_services(rig: Any, asked: int | None, k: int) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request(num_speculative_tokens=asked))
    assert (await verifier.next_command("open")).num_speculative_tokens == k
    running.task.cancel()


async def test_k_and_window_follow_price_and_acceptance_and_are_sent_only_when_they_change(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    drafter.say(load=drafter_pb2.DrafterLoad(token_seconds=0.01, round_trip_seconds=0.001))
    await rig.until(lambda: rig.fleet.drafters["d"].load.token_seconds > 0)
    running = Running(rig, request(max_tokens=500))
    sid = (await verifier.next_command("open")).session_id
    await drafter.next_command("open")
    base = 3

    def step(accepted: int, verified: int, price: float) -> None:
        nonlocal base
        load = verifier_pb2.VerifierLoad(price=price, step_seconds=0.1, typical_step_seconds=0.1)
        tokens = [20] * (accepted + 1)
        verifier.say(load=load, **committed(sid, base, *tokens, accepted=accepted, verified=verified))
        base += accepted + 1

    step(
        8, 8, 0.0
    )  # k stays at the cap; with the paces known the window is 8 + ceil(.101 / .01) = 19, as good
    for _ in range(40):
        step(0, 8, 0.0)  # drafts are worth nothing, but cost nothing either
    step(0, 8, 0.9)  # too dear now
    assert (await verifier.next_command("speculation")).num_speculative_tokens == 0
    assert (await drafter.next_command("window")).window == 0
    step(0, 0, 0.9)
    step(0, 0, 0.0)  # free again
    assert (await verifier.next_command("speculation")).num_speculative_tokens == 8
    assert (await drafter.next_command("window")).window == 19
    await rig.until(lambda: len(running.events) == 44)
    assert verifier.commands.empty()
    assert drafter.commands.empty()
    assert b"outrider_draft_window_count" in rig.metrics.exposition()
    running.task.cancel()


async def test_in_lock_step_the_window_is_k(rig: Any) -> None:
    rig.sessions._lock_step = True
    verifier, drafter = await rig.verifier(), await rig.drafter()
    drafter.say(load=drafter_pb2.DrafterLoad(token_seconds=0.01, round_trip_seconds=0.001))
    await rig.until(lambda: rig.fleet.drafters["d"].load.token_seconds > 0)
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    assert (await drafter.next_command("open")).window == opened.num_speculative_tokens == 8
    estimator = Estimator()
    for base, k in ((3, 4), (4, 5)):  # it follows k at every change, however small
        estimator.observe(0, 8, 1)
        price = estimator.acceptance ** (k + 0.5) / MARGIN  # worth it for k, not for one more
        load = verifier_pb2.VerifierLoad(price=price, step_seconds=0.1, typical_step_seconds=0.1)
        verifier.say(load=load, **committed(opened.session_id, base, 9, accepted=0, verified=8))
        assert (await verifier.next_command("speculation")).num_speculative_tokens == k
        assert (await drafter.next_command("window")).window == k
    running.task.cancel()


async def test_a_new_session_starts_from_what_earlier_ones_showed(rig: Any) -> None:
    """Of four draft tokens a step one is accepted: every other one that is looked at, which pays here."""
    verifier = await rig.verifier()
    await rig.drafter()
    verifier.say(load=verifier_pb2.VerifierLoad(price=0.2))
    await rig.until(lambda: rig.fleet.verifiers["v"].load.price > 0)
    starts = []
    for _ in range(16):
        running = Running(rig, request(max_tokens=12))
        while (command := await verifier.commands.get()).WhichOneof("command") != "open":
            pass  # a change of k in the session before
        opened = command.open
        starts.append(opened.num_speculative_tokens)
        for n in range(0, 12, 2):
            verifier.say(**committed(opened.session_id, 3 + n, 9, 9, accepted=1, verified=4))
        verifier.say(**finished(opened.session_id, verifier_pb2.FINISH_REASON_LENGTH))
        await running.task
    assert (starts[0], starts[-1]) == (8, 5)
    assert starts == sorted(starts, reverse=True)


async def test_sessions_are_steered_while_their_client_does_not_read(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter("d1")
    events = rig.sessions.run(request())
    first = asyncio.create_task(first_step(events))
    sid = (await verifier.next_command("open")).session_id
    await drafter.next_command("open")
    verifier.say(**committed(sid, 3, 10))
    await first  # and then nobody asks for more
    verifier.say(**committed(sid, 4, 11, 12, accepted=1, verified=1))
    await rig.until(lambda: rig.fleet.verifiers["v"].placed == 1)
    other = await rig.drafter("d2")
    verifier.say(load=verifier_pb2.VerifierLoad(running=1))
    await rig.until(lambda: rig.fleet.verifiers["v"].load.running == 1)
    await drafter.stop()
    assert list((await other.next_command("open")).output) == [10, 11, 12]
    await events.aclose()


async def test_while_drafts_rest_nothing_is_held_against_the_drafter(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request(max_tokens=500))
    sid = (await verifier.next_command("open")).session_id
    await drafter.next_command("open")
    resting = verifier_pb2.VerifierLoad(drafts_rest=True, draft_gain=0.75, draft_trials=3)
    for base in range(3, 403):
        verifier.say(load=resting, **committed(sid, base, 9))
    await rig.until(lambda: len(running.events) == 400)
    assert verifier.commands.empty() and drafter.commands.empty()
    told = rig.metrics.exposition().decode()
    assert 'outrider_drafts_rest{engine="v",model_name="m"} 1.0' in told
    assert 'outrider_draft_gain{engine="v",model_name="m"} 0.75' in told
    assert 'outrider_draft_trials_total{engine="v",model_name="m"} 3.0' in told
    running.task.cancel()
