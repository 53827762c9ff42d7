"""Several drafters at one session: each has a seat, and what they send stands in one tree."""

from __future__ import annotations

import asyncio
import random

import pytest

from outrider.net.draft_right import right
from outrider.sampling.params import SamplingParams
from outrider.v1 import verifier_pb2
from outrider.wire.session import SessionParams
from tests.verifier.talk import Running as Verifier
from tests.verifier.talk import Talk, attach, drafter, open_session, output, router
from tests.verifier.test_drafters import LENGTH, Honest, until
from verifier.drafter_peer import DrafterPeer
from verifier.drafter_seat import DrafterSeat
from verifier.running import Running
from verifier.session import DraftFate, Session, SessionSpec
from verifier.step_start import FIRST_ACCEPTANCE
from verifier.survival_calibration import Agreement

LIMIT_DRAFTS = 40
FIRST = b"f" * 16  # a session
ONE = b"1" * 16


def seated() -> tuple[Running, DrafterSeat, DrafterSeat]:
    """Returns a session whose last token has not run yet, and its two seats with a drafter each."""
    spec = SessionSpec(b"s" * 16, SessionParams((1, 2, 3), SamplingParams(), 50), (), 100, ONE)
    running = Running(Session(spec, 4), None)
    running.seat(1)
    running.table.blocks, running.table.length = [0], 2
    for turn, name in enumerate("ab"):
        running.seats[turn].take(DrafterPeer(name, lambda: 0.0), turn, right(ONE, turn, seat=turn))
    return running, *running.seats  # type: ignore[return-value]


def settle(running: Running, chosen: list[int], now: float) -> int:
    """Verifies all that stands. Returns how many draft tokens were accepted."""
    return running.settle(running.nodes(), chosen, now).accepted


def test_what_two_drafters_send_stands_in_one_tree_and_each_acknowledges_for_itself() -> None:
    running, first, second = seated()
    assert first.offer(3, [10, 11], (), b"", 0.1) == (DraftFate.TAKEN, True)
    assert second.offer(3, [10, 11, 12], (), b"", 0.2) == (DraftFate.TAKEN, True)
    assert running.nodes().tokens == [10, 11, 12]
    assert settle(running, [10, 11, 12, 13], 0.3) == 3
    assert running.session.log == [1, 2, 3, 10, 11, 12, 13]
    assert second.offer(5, [12, 13, 14], (), b"", 0.4) == (DraftFate.TAKEN, True)
    assert (first.acknowledged, second.acknowledged) == (3, 5)


def test_who_is_late_at_one_seat_is_late_there_only_and_the_other_is_waited_for() -> None:
    running, first, second = seated()
    for step in range(3):
        base, now = len(running.session.log), float(step)
        running.table.length = base - 1
        second.offer(base, [9], (), b"", now + 0.1)
        second.offer(base, [9, 8], (), b"", now + 0.2)
        settle(running, [9, 8, 7], now + 0.5)
    running.table.length = len(running.session.log) - 1
    first.arrivals = first.arrivals.committed(3.0, verified=0)  # a plain step, and again nothing has come
    assert first.arrivals.silent and not second.arrivals.silent
    (awaited,) = running.awaited()
    assert second.pace is not None and awaited.lead == second.pace.lead


def test_when_one_drafter_leaves_the_other_drafts_on() -> None:
    running, first, second = seated()
    first.leave()
    assert running.drafted
    second.offer(3, [10], (), b"", 0.1)
    assert running.nodes().tokens == [10]
    second.leave()
    assert not running.drafted and running.nodes().tokens == []


def test_what_is_learnt_of_a_drafter_is_held_against_it_in_its_next_session_and_not_against_another() -> None:
    running, first, second = seated()
    drafter, other = first.peer, second.peer
    assert drafter is not None and other is not None
    for _ in range(20):
        base = len(running.session.log)
        running.table.length = base - 1
        first.offer(base, [9], (), bytes([255]), 0.0)
        settle(running, [5, 5], 0.0)
        if running.session.room <= 1:
            break
    belief, acceptance = first.calibration.at(0), first.acceptance
    assert belief < 0.5 and acceptance < 0.4
    first.leave()
    first.take(drafter, 0, right(ONE, 0))  # its stream broke
    assert (first.calibration.at(0), first.acceptance) == (belief, acceptance)
    first.renew(b"3" * 16)
    assert (first.peer, first.turn, first.pace) == (None, 0, None)
    first.take(other, 0, right(b"3" * 16, 0))
    assert (first.calibration.at(0), first.acceptance) == (1.0, FIRST_ACCEPTANCE)
    running, first, _ = seated()
    first.take(drafter, 1, right(ONE, 1))
    assert first.calibration.at(0) == belief and first.calibration.at(7) < 0.5


def test_a_drafter_that_has_gone_quiet_is_not_waited_for_though_the_other_s_drafts_are_verified() -> None:
    running, quiet, active = seated()
    quiet.offer(3, [9], (), b"", 0.1)
    for step in range(3):
        base = len(running.session.log)
        running.table.length = base - 1
        for drafts in ([9], [9, 8]):
            active.offer(base, drafts, (), b"", step + 0.1 * len(drafts))
        assert settle(running, [9, 8, 7], step + 0.5) == 2
        assert quiet.arrivals.silent == (step > 0) and not active.arrivals.silent
    assert quiet.pace is not None and active.pace is not None and quiet.pace.punctual < active.pace.punctual
    running.table.length = len(running.session.log) - 1
    (awaited,) = running.awaited()
    assert awaited.committed_at == active.arrivals.committed_at and awaited.lead == active.pace.lead
    active.offer(len(running.session.log), [9], (), b"", 3.1)
    fate = quiet.offer(len(running.session.log), [9], (), b"", 3.2)
    assert fate == (DraftFate.TAKEN, True), "what another has said, it had not"
    assert not quiet.arrivals.silent and len(running.awaited()) == 1, "one token more, whoever says it"


@pytest.mark.parametrize(("chance", "waits_for"), [(0.1, "the slow one"), (1.0, "the quick one")])
def test_a_weak_guess_of_a_quick_drafter_keeps_nobody_from_waiting_for_a_better_one(
    chance: float, waits_for: str
) -> None:
    """What comes behind a guess that is hardly right is worth little, and another in its place much."""
    running, quick, slow = seated()
    for seat in (quick, slow):
        seat.offer(3, [9], (), b"", 0.1)
    settle(running, [9, 8], 0.2)
    running.table.length = len(running.session.log) - 1
    quick.offer(5, [7], (), bytes([round(255 * chance)]), 0.3)
    (awaited,) = running.awaited()
    assert awaited.tokens == (0 if waits_for == "the slow one" else 1)


def test_who_has_not_said_all_of_the_path_is_not_waited_for() -> None:
    running, behind, ahead = seated()
    for seat in (behind, ahead):
        seat.offer(3, [9], (), b"", 0.1)
    settle(running, [9, 8], 0.2)
    running.table.length = len(running.session.log) - 1
    assert len(running.awaited()) == 1, "one of them"
    ahead.offer(5, [7, 6], (), b"", 0.3)
    behind.offer(5, [7], (), b"", 0.3)
    (awaited,) = running.awaited()
    assert awaited.last_at == ahead.arrivals.last_at and awaited.tokens == 2


def test_each_path_is_believed_as_its_own_seat_s_calibration_says() -> None:
    """One drafter says .6 and is always right, the other says 1 and never is."""
    running, honest, boastful = seated()
    accepted = []
    for step in range(16):
        base, now = len(running.session.log), float(step)
        running.table.length = base - 1
        honest.offer(base, [9], (), bytes([153]), now)
        boastful.offer(base, [5], (), bytes([255]), now)
        accepted.append(settle(running, [9, 8] if running.nodes().tokens == [9] else [9], now))
    assert accepted[0] == 0 and all(accepted[4:]), "who promises most is tried first, and soon no more"
    assert honest.calibration.at(0) == honest.calibration.prevailing.factors[0] == 1
    assert boastful.calibration.at(0) < 0.7 and boastful.calibration.prevailing.factors[0] < 0.3
    assert honest.acceptance > 0.8 and boastful.acceptance < 0.2, "both are judged by what they said"


async def test_two_drafters_at_two_seats_hear_the_same_commits_and_the_text_is_the_targets(
    verifier: Verifier,
) -> None:
    talk = await router(verifier)
    talk.say(open_session(FIRST, max_tokens=LENGTH, num_speculative_tokens=0))
    alone = await output(talk, FIRST)
    again = b"a" * 16
    talks = [await drafter(verifier, name) for name in ("1", "2")]
    talk.say(open_session(again, max_tokens=1000))
    await until(lambda: verifier.stepper.get(again) is not None)
    running = verifier.stepper.get(again)
    assert running is not None
    for turn, each in enumerate(talks):
        each.say(attach(again, turn=turn, seat=turn))
    drafting = [asyncio.create_task(Honest(each, again, alone).run()) for each in talks]
    try:
        await until(lambda: len(running.seats) == 2 and all(seat.peer for seat in running.seats))
        assert (await output(talk, again))[:LENGTH] == alone
        assert all(seat.acknowledged is not None for seat in running.seats)
        assert all(seat.arrivals.committed_at is not None for seat in running.seats)
    finally:
        for task in drafting:
            task.cancel()


async def test_a_drafter_that_dies_or_is_cut_off_costs_its_own_seat_alone(verifier: Verifier) -> None:
    talk = await router(verifier)
    talk.say(open_session(FIRST, max_tokens=LENGTH, num_speculative_tokens=0))
    alone, again = await output(talk, FIRST), b"a" * 16
    talks = [await drafter(verifier, name) for name in ("1", "2", "3")]
    talk.say(open_session(again, max_tokens=1000))
    await until(lambda: verifier.stepper.get(again) is not None)
    running = verifier.stepper.get(again)
    assert running is not None
    for turn, each in enumerate(talks):
        each.say(attach(again, turn=turn, seat=turn))
    drafting = asyncio.create_task(Honest(talks[0], again, alone).run())
    try:
        await until(lambda: len(running.seats) == 3 and all(seat.peer for seat in running.seats))
        talks[1].call.cancel()
        bad = verifier_pb2.Draft(session_id=again, base=3, tokens=[1], parents=[7])
        for _ in range(LIMIT_DRAFTS):
            talks[2].say(verifier_pb2.DraftBatch(drafts=[bad]))
        blamed = await cut_off(talk)
        assert (blamed.session_id, blamed.turn) == (again, 2)
        await until(lambda: running.seats[1].peer is None and running.seats[2].peer is None)
        assert running.seats[0].peer is not None and running.drafted
    finally:
        drafting.cancel()


async def cut_off(talk: Talk) -> verifier_pb2.DrafterCutOff:
    while True:
        for blamed in (await talk.hear()).cut_off:
            return blamed


async def test_a_drafter_that_comes_with_the_right_of_another_seat_has_left_its_own(
    verifier: Verifier,
) -> None:
    talk, one = await router(verifier), await drafter(verifier, "1")
    talk.say(open_session(FIRST, max_tokens=1000, num_speculative_tokens=0))
    await until(lambda: verifier.stepper.get(FIRST) is not None)
    running = verifier.stepper.get(FIRST)
    assert running is not None
    for turn, seat in enumerate((0, 1)):
        one.say(attach(FIRST, turn=turn, seat=seat))
    await until(lambda: len(running.seats) == 2 and running.seats[1].peer is not None)
    assert running.seats[0].peer is None


def test_what_several_say_is_told_of_each_and_what_it_alone_said() -> None:
    running, first, second = seated()
    first.offer(3, [10, 11], (), b"", 0.1)
    second.offer(3, [10, 11, 12, 13], (), b"", 0.2)
    outcome = running.settle(running.nodes(), [10, 11, 12, 9, 9], 0.3)
    assert [tuple(each)[:4] for each in outcome.drafters] == [(0, 2, 2, 0), (1, 4, 3, 2)]


def agreeing(right: float, copied: bool, steps: int = 400) -> float:
    """Returns what is left of the chance to be wrong where two say the same, of which each is right so
    often; the one by itself, or as the other is."""
    rng, agreement = random.Random(7), Agreement()
    for _ in range(steps):
        first = rng.random() < right
        second = first if copied else rng.random() < right
        if first is second and (first or copied or rng.random() < 0.1):  # of two that err few err alike
            agreement.judge(1 - (1 - right) * agreement.factor, first)
    return agreement.factor


def test_a_token_that_two_say_is_likelier_by_as_much_as_such_tokens_were_right() -> None:
    assert agreeing(0.75, copied=False) < 0.2
    assert agreeing(0.75, copied=True) > 0.8, "a copy adds nothing"
    running, first, second = seated()
    first.offer(3, [10], (), bytes([153]), 0.1)
    alone = running.nodes().chances[0]
    second.offer(3, [10], (), bytes([102]), 0.1)
    assert alone == pytest.approx(0.6, abs=0.01)
    for _ in range(20):
        running.agreement.judge(0.6, True)
    running.session.tree.believe({}, agreed=running.agreement.factor)
    assert 0.9 < running.nodes().chances[0] < 1


def test_a_liar_beside_an_honest_drafter_soon_costs_nothing_but_its_own_guesses() -> None:
    """Garbage with certainty 1, of another token each time, beside one that is right and says .7: where one
    path is verified, it takes the path in the first steps alone."""
    running, honest, liar = seated()
    accepted = []
    for step in range(12):
        base, now = len(running.session.log), float(step)
        running.table.length = base - 1
        honest.offer(base, [base, base + 1], (), bytes([178, 140]), now)
        liar.offer(base, [80 + step, 97, 98, 99], (), b"", now)
        accepted.append(settle(running, [base, base + 1, base + 2, base + 3, base + 4], now))
    assert accepted[4:] == [2] * 8


def test_what_stood_when_another_drafter_came_was_said_by_the_former_one() -> None:
    spec = SessionSpec(b"s" * 16, SessionParams((1, 2, 3), SamplingParams(), 50, guesses=True), (), 100, ONE)
    running = Running(Session(spec, 4), None)
    running.table.blocks, running.table.length = [0], 2
    (seat,) = running.seats
    seat.take(DrafterPeer("a at h", lambda: 0.0, worker_id="a"), 0, right(ONE, 0))
    seat.offer(3, [10, 11], (), bytes([255, 127]), 0.1)
    seat.take(DrafterPeer("b at h", lambda: 0.0, worker_id="b"), 1, right(ONE, 1))
    seat.offer(3, [10, 11, 12], (), bytes([255, 127, 63]), 0.2)
    outcome = running.settle(running.nodes(), [10, 11, 13, 14], 0.3)
    assert [(one.token, one.drafter) for one in outcome.guesses] == [(10, "a"), (11, "a"), (12, "b")]
    assert [round(one.chance, 2) for one in outcome.guesses] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("branches", [False, True])
def test_what_an_accepted_token_saved_is_shared_by_those_who_said_it(branches: bool) -> None:
    """Who says what others say may have as much of it read as it saved, not as all of them did."""
    running, first, second = seated()
    first.offer(3, [10, 11], (), bytes([200, 190]), 0.1)
    second.offer(3, [10, 11, 12], (), bytes([200, 190, 180]), 0.2)
    if branches:
        second.offer(3, [9], (), bytes([20]), 0.3)
    nodes = running.nodes(0.01 if branches else 2.0)
    assert nodes.is_path is not branches
    chosen = [10, *({10: 11, 11: 12, 12: 13, 9: 5}[token] for token in nodes.tokens)]
    assert running.settle(nodes, chosen, 0.4).accepted == 3
    assert (first.unpaid, second.unpaid) == (1.0, 2.0)


def test_a_drafter_that_has_nothing_to_guess_has_caught_up_once_it_says_so_and_anew_after_a_rest() -> None:
    running, first, second = seated()
    settle(running, [9], 0.1)
    assert not first.caught_up and not second.caught_up
    assert first.offer(4, [], (), b"", 0.2) == (DraftFate.STALE, False)  # it follows, and guesses nothing
    assert first.caught_up and not second.caught_up
    for resting in (True, False):
        running.session.rest(resting)
        first.forget()
        if resting:
            first.offer(4, [5], (), b"", 0.3)  # was on its way
        assert not first.caught_up
    first.offer(4, [], (), b"", 0.4)
    assert first.caught_up
    first.leave()
    assert not first.caught_up
