"""Who is cut off, for how long, and how much of a drafter is read."""

from __future__ import annotations

from outrider.net.places import host_of
from outrider.net.token_bucket import TokenBucket
from verifier.misbehavior import BAN_SECONDS, LEAK, LIMIT, REMEMBERED, WEIGHTS, Misbehaviors
from verifier.session import DraftFate


def test_one_that_keeps_offending_is_cut_off_and_let_in_again_later() -> None:
    conducts = Misbehaviors()
    offences = [conducts.offend(("", "d"), 4.0, 10.0) for _ in range(round(LIMIT / 4))]
    assert offences == [False] * (len(offences) - 1) + [True]
    assert conducts.banned_for(("", "d"), 10.0) == BAN_SECONDS
    assert conducts.banned_for(("", "d"), 11.0 + BAN_SECONDS) == 0
    assert conducts.banned_for(("", "another"), 10.0) == 0
    assert not conducts.offend(("", "d"), 4.0, 11.0 + BAN_SECONDS)


def test_a_fault_now_and_then_is_forgotten() -> None:
    conducts = Misbehaviors()
    assert not any(conducts.offend(("", "d"), LEAK * 10, 10.0 * turn) for turn in range(1000))


def test_a_good_name_is_no_credit() -> None:
    conducts = Misbehaviors()
    conducts.offend(("", "d"), 4.0, 0.0)
    offences = [conducts.offend(("", "d"), 4.0, 1000.0) for _ in range(round(LIMIT / 4))]
    assert offences == [False] * (len(offences) - 1) + [True]


def test_what_honest_drafters_do_too_weighs_nothing() -> None:
    conducts = Misbehaviors()
    for reason in (DraftFate.STALE.value, "not_attached", "held_back"):
        assert not any(conducts.offend(("", "d"), WEIGHTS.get(reason, 0.0), 0.0) for _ in range(1000))


def test_every_fate_of_a_draft_but_four_is_an_offence() -> None:
    harmless = {fate for fate in DraftFate if fate.value not in WEIGHTS}
    assert harmless == {DraftFate.TAKEN, DraftFate.STALE, DraftFate.RESTING, DraftFate.AHEAD}


def test_a_drafter_is_known_by_its_host_whatever_port_it_comes_from() -> None:
    assert host_of("ipv4:192.0.2.1:50051") == host_of("ipv4:192.0.2.1:50052") == "ipv4:192.0.2.1"
    assert host_of("ipv6:%5B2001:db8::1%5D:50051") == "ipv6:%5B2001:db8::1%5D"


def test_names_without_end_take_no_memory_without_end() -> None:
    conducts = Misbehaviors()
    for name in range(3 * REMEMBERED):
        conducts.offend(("", str(name)), 1.0, 0.0)
    assert len(conducts._by_name) == REMEMBERED


def test_who_offended_longest_ago_is_forgotten_first() -> None:
    conducts = Misbehaviors()
    for name in range(REMEMBERED):
        conducts.offend(("", str(name)), LIMIT / 2, 0.0)
    conducts.offend(("", "0"), 1.0, 0.0)
    conducts.offend(("", "another"), 1.0, 0.0)
    assert conducts.offend(("", "0"), LIMIT / 2, 0.0) and not conducts.offend(("", "1"), LIMIT / 2, 0.0)


def test_an_allowance_is_used_up_and_comes_back() -> None:
    allowance = TokenBucket(rate=100.0, burst=50.0)
    assert allowance.spend(50.0, 0.0) == 0
    assert allowance.spend(25.0, 0.0) == 0.25
    assert allowance.spend(0.0, 0.25) == 0
    assert allowance.spend(50.0, 10.0) == 0
    assert allowance.spend(25.0, 10.0) == 0.25  # however long nothing was used
