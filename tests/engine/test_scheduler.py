"""Who runs in a step. Blocks hold 16 tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.kv_blocks import Cached
from outrider.engine.scheduler import SPARED_AFTER, Candidate, Grant, Limits, Schedule, schedule

LIMITS = Limits(max_tokens=64, prefill_chunk=32, block_size=16)


def decoding(drafts: int = 0, cached: int = 20) -> Candidate:
    return Candidate(1, drafts, cached, -(-cached // 16))


def newcomer(prompt: int) -> Candidate:
    return Candidate(prompt, 0, 0, 0)


def test_every_decoding_session_gets_its_token_and_its_drafts() -> None:
    got = schedule([decoding(3), decoding(5)], 10, LIMITS)
    assert got == Schedule((Grant(0, 1, 3), Grant(1, 1, 5)))


def test_the_token_budget_is_shared_tokens_first_then_drafts_in_order() -> None:
    got = schedule([decoding(40), decoding(40)], 10, LIMITS)
    assert got.grants == (Grant(0, 1, 40), Grant(1, 1, 22))


def test_a_prompt_is_read_in_by_chunks_beside_those_who_decode() -> None:
    got = schedule([decoding(), newcomer(100)], 50, LIMITS)
    assert got.grants == (Grant(0, 1, 0), Grant(1, 32, 0))


def test_alone_a_prompt_takes_the_whole_budget_or_what_it_may() -> None:
    assert schedule([newcomer(100)], 50, LIMITS).grants == (Grant(0, 64, 0),)
    assert schedule([newcomer(100)], 50, LIMITS, alone=40).grants == (Grant(0, 40, 0),)
    assert schedule([decoding(), newcomer(100)], 50, LIMITS, alone=4).grants[1] == Grant(1, 32, 0)


def test_drafts_are_left_out_before_anybody_is_preempted() -> None:
    assert schedule([decoding(30, cached=31)], 0, LIMITS).grants == (Grant(0, 1, 0),)


def test_who_has_least_to_compute_again_gives_its_blocks_up() -> None:
    assert schedule([decoding(cached=32), decoding(cached=32)], 1, LIMITS).preempt == 1
    assert schedule([decoding(cached=32), decoding(cached=64)], 1, LIMITS).preempt == 0
    everyone = [decoding(cached=32), decoding(cached=64), decoding(cached=48)]
    assert schedule(everyone, 1, LIMITS, lost=[30, 10, 20].__getitem__).preempt == 1  # much of it is shared


def test_who_was_preempted_often_is_spared_while_others_had_fewer() -> None:
    small, large = decoding(cached=32), decoding(cached=64)
    often = small._replace(preempted=SPARED_AFTER)
    assert schedule([small._replace(preempted=SPARED_AFTER - 1), large], 1, LIMITS).preempt == 0
    assert schedule([often, large], 1, LIMITS).preempt == 1
    assert schedule([often, large._replace(preempted=SPARED_AFTER)], 1, LIMITS).preempt == 0


def test_a_newcomer_waits_where_its_prompt_does_not_fit_beside_the_others() -> None:
    assert schedule([decoding(), newcomer(100)], 6, LIMITS).grants == (Grant(0, 1, 0),)


def test_newcomers_start_in_order_of_arrival() -> None:
    assert schedule([decoding(), newcomer(200), newcomer(3)], 6, LIMITS).grants == (Grant(0, 1, 0),)


def test_those_that_fit_pass_one_that_does_not_as_long_as_it_yields() -> None:
    yielding = newcomer(200)._replace(yields=True)
    everyone = [decoding(), yielding, newcomer(3), newcomer(90), newcomer(4)]
    assert schedule(everyone, 6, LIMITS).grants == (Grant(0, 1, 0), Grant(2, 3, 0))
    everyone[3] = everyone[3]._replace(yields=True)
    assert schedule(everyone, 6, LIMITS).grants == (Grant(0, 1, 0), Grant(2, 3, 0), Grant(4, 4, 0))
    interrupted = yielding._replace(preempted=1)
    assert schedule([decoding(), interrupted, newcomer(3)], 6, LIMITS).grants == (Grant(0, 1, 0),)


def test_who_was_interrupted_is_read_in_before_newcomers() -> None:
    """And they among themselves in order of arrival, as newcomers are."""
    again = newcomer(20)._replace(preempted=1)
    everyone = [decoding(), newcomer(20), again, newcomer(3), again]
    assert schedule(everyone, 50, LIMITS).grants == (Grant(0, 1, 0), Grant(2, 20, 0), Grant(4, 12, 0))
    begun = again._replace(pending=4, cached=16, blocks=1)
    half_read = Candidate(30, 0, 16, 1)
    assert schedule([half_read, newcomer(9), begun], 50, LIMITS).grants == (
        *(Grant(2, 4, 0), Grant(0, 30, 0), Grant(1, 9, 0)),
    )


def test_tenants_prompts_are_read_in_turns() -> None:
    """However many one has sent before, another's first is next."""
    many = [newcomer(20)._replace(tenant=b"a")] * 40
    other = newcomer(20)._replace(tenant=b"b")
    assert schedule([*many, other, other], 90, LIMITS).grants == (
        *(Grant(0, 20, 0), Grant(40, 20, 0), Grant(1, 20, 0), Grant(41, 4, 0)),
    )
    runs, interrupted = decoding()._replace(tenant=b"a"), newcomer(20)._replace(tenant=b"a", preempted=1)
    assert schedule([runs, *many, interrupted, other], 90, LIMITS).grants == (
        *(Grant(0, 1, 0), Grant(42, 20, 0), Grant(41, 12, 0)),
    )
    hurried = many[0]._replace(priority=0)
    assert schedule([hurried, other._replace(priority=1)], 90, LIMITS).grants[0].index == 0


def test_a_long_prompt_that_is_read_holds_up_no_tenants_shorter_one() -> None:
    """It had to be read to its end before: seconds, in which another key's words of a few tokens waited."""
    half_read = Candidate(100, 0, 160, 10, tenant=b"a")
    short, shorter = newcomer(50)._replace(tenant=b"b"), newcomer(3)._replace(tenant=b"c")
    assert schedule([half_read, short], 50, LIMITS).grants == (Grant(1, 32, 0), Grant(0, 32, 0))
    assert schedule([half_read, short, short, shorter], 50, LIMITS).grants == (
        *(Grant(3, 3, 0), Grant(1, 29, 0), Grant(0, 32, 0)),
    )
    assert schedule([decoding(), half_read, short], 50, LIMITS).grants == (
        *(Grant(0, 1, 0), Grant(2, 16, 0), Grant(1, 16, 0)),
    )
    ones = [half_read, short._replace(tenant=b"a"), shorter._replace(priority=1)]
    assert schedule(ones, 50, LIMITS).grants == (Grant(0, 64, 0),)


def test_a_shorter_prompt_takes_no_room_of_the_long_one_before_it() -> None:
    half_read = Candidate(100, 0, 160, 10, tenant=b"a")
    begun, short = Candidate(40, 0, 32, 2, tenant=b"b"), newcomer(3)._replace(tenant=b"b")
    for other in (short, begun):
        assert schedule([half_read, other], 7, LIMITS).grants == (Grant(0, 64, 0),)
        assert schedule([half_read, other], 10, LIMITS).grants[0].index == 1


def test_a_prompt_that_does_not_fit_holds_up_no_tenant_whose_turn_comes_before() -> None:
    """Though it came first."""
    large, small = newcomer(90)._replace(tenant=b"a"), newcomer(3)._replace(tenant=b"b")
    runs = decoding()._replace(tenant=b"a")
    assert schedule([runs, large, small], 4, LIMITS).grants == (Grant(0, 1, 0), Grant(2, 3, 0))


def test_drafts_take_nothing_from_a_prompt_that_is_to_be_read() -> None:
    everyone = [decoding(31), decoding(31), newcomer(20)]
    assert schedule(everyone, 10, LIMITS).grants == (Grant(0, 1, 31), Grant(1, 1, 11), Grant(2, 20, 0))
    assert schedule(everyone, 4, LIMITS).grants == (Grant(0, 1, 31), Grant(1, 1, 11), Grant(2, 20, 0))
    assert (
        Grant(2, 20, 0) not in schedule(everyone, 3, LIMITS).grants
    )  # a block of growth is kept for each decoder


def test_a_newcomer_starts_only_where_its_whole_prompt_fits_even_if_nobody_else_runs() -> None:
    """Blocks that it finds cached are taken out of the available ones, too."""
    assert schedule([newcomer(100)], 6, LIMITS).grants == ()
    assert schedule([newcomer(100)], 7, LIMITS).grants == (Grant(0, 64, 0),)


def test_what_newcomers_find_cached_is_not_read() -> None:
    """So several start in a step that could not read one of them whole."""
    found = [Cached(), Cached(96), Cached(80), Cached(96)]
    everyone = [decoding(), newcomer(100), newcomer(90), newcomer(150)]
    got = schedule(everyone, 50, LIMITS, cached=found.__getitem__)
    assert got.grants == (Grant(0, 1, 0), Grant(1, 4, 0), Grant(2, 10, 0), Grant(3, 18, 0))
    assert (
        schedule([newcomer(16)], 50, LIMITS, cached=lambda index: Cached(16)) == Schedule()
    )  # nothing is left to read


def test_what_others_hold_takes_no_room() -> None:
    assert schedule([newcomer(100)], 2, LIMITS, cached=lambda index: Cached(96, 5)).grants == (
        Grant(0, 4, 0),
    )
    assert schedule([newcomer(100)], 2, LIMITS, cached=lambda index: Cached(96, 4)).grants == ()


candidates = st.lists(
    st.builds(
        lambda pending, drafts, cached, extra: Candidate(
            pending, drafts if pending == 1 else 0, cached, -(-cached // 16) + (extra if cached else 0)
        ),
        st.integers(1, 80),
        st.integers(0, 9),
        st.integers(0, 90),
        st.integers(0, 1),
    ),
    max_size=12,
)


@given(candidates, st.integers(0, 12), st.integers(0, 5), st.integers(0, 5))
def test_a_plan_keeps_its_limits(everyone: list[Candidate], available: int, shared: int, held: int) -> None:
    found = {
        index: Cached(16 * (blocks := min(shared, (one.pending - 1) // 16)), min(held, blocks))
        for index, one in enumerate(everyone)
        if not one.blocks
    }
    got = schedule(everyone, available, LIMITS, cached=found.__getitem__)
    if got.preempt is not None:
        assert everyone[got.preempt].blocks > 0 and not got.grants
        return
    assert sum(grant.tokens + grant.drafts for grant in got.grants) <= LIMITS.max_tokens
    taken = 0
    for grant in got.grants:
        candidate = everyone[grant.index]
        assert 1 <= grant.tokens <= candidate.pending and grant.drafts <= candidate.drafts
        assert not grant.drafts or grant.tokens == candidate.pending
        shares = found.get(grant.index, Cached())
        slots = candidate.cached + shares.tokens + grant.tokens + grant.drafts
        taken += max(0, -(-slots // 16) - candidate.blocks - shares.held)
    assert taken <= available
    assert len({grant.index for grant in got.grants}) == len(got.grants)


@given(candidates, st.integers(0, 12))
def test_preempting_comes_to_an_end_and_who_has_most_is_the_last(
    everyone: list[Candidate], available: int
) -> None:
    holders = [index for index, candidate in enumerate(everyone) if candidate.blocks > 0]
    holders.sort(key=lambda index: (-everyone[index].cached, index))
    for _ in range(len(everyone) + 1):
        got = schedule(everyone, available, LIMITS)
        if got.preempt is None:
            return
        assert got.preempt == holders.pop()
        victim = everyone[got.preempt]
        available += victim.blocks
        everyone[got.preempt] = Candidate(victim.pending + victim.cached, 0, 0, 0)
    raise AssertionError("preempted without an end")


def test_one_that_gives_way_loses_its_blocks_to_one_that_does_not() -> None:
    low, lower = Candidate(1, 0, 40, 3, priority=5), Candidate(1, 0, 30, 2, priority=9)
    person = Candidate(60, 0, 0, 0)
    assert schedule([person, low, lower], 1, LIMITS).preempt == 2
    assert schedule([person, low], 1, LIMITS).preempt is None  # it would be in vain
    alike = schedule([Candidate(60, 0, 0, 0, priority=5), low], 3, LIMITS)
    assert alike.preempt is None and [grant.index for grant in alike.grants] == [1]


def test_the_greatest_priority_goes_first_where_blocks_run_out() -> None:
    at_the_end = Candidate(1, 0, 16, 1)
    assert schedule([at_the_end, Candidate(1, 0, 64, 4, priority=3)], 0, LIMITS).preempt == 1
    assert schedule([at_the_end, Candidate(1, 0, 64, 4)], 0, LIMITS).preempt == 0


def test_prompts_are_read_in_order_of_priority() -> None:
    interrupted = Candidate(60, 0, 0, 0, preempted=1, priority=1)
    granted = schedule([Candidate(40, 0, 0, 0), interrupted], 100, LIMITS).grants
    assert [(grant.index, grant.tokens) for grant in granted] == [(0, 40), (1, 24)]


def test_so_many_logits_of_prompts_are_asked_for_in_a_step() -> None:
    limits = Limits(max_tokens=64, prefill_chunk=32, block_size=16, scored=10)
    asked, other = Candidate(30, 0, 0, 0, scored=True), Candidate(30, 0, 0, 0)
    granted = schedule([asked, asked, other], 100, limits).grants
    assert [(grant.index, grant.tokens) for grant in granted] == [(0, 10), (2, 30)]


PLACES = Limits(max_tokens=64, prefill_chunk=32, block_size=16, sessions=4)


def test_a_tenant_that_has_all_places_gives_one_up_to_anothers_first_prompt() -> None:
    """Else it would wait until one of those texts is at its end, however long that is."""
    many = [decoding(cached=20 + 16 * index)._replace(tenant=b"a") for index in range(4)]
    other = newcomer(20)._replace(tenant=b"b")
    assert schedule([*many, other], 50, PLACES).preempt == 0
    assert schedule([*many, other], 1, PLACES).preempt == 0
    large = newcomer(16 * 20)._replace(tenant=b"b")
    assert schedule([*many, large], 1, PLACES).preempt is None, "it would find no room"
    assert schedule([*many, newcomer(20)._replace(tenant=b"a")], 50, PLACES).preempt is None
    halves = [*many[:2], *(one._replace(tenant=b"b") for one in many[2:])]
    assert schedule([*halves, other], 50, PLACES).preempt is None
    assert schedule([*halves, other._replace(tenant=b"c")], 50, PLACES).preempt == 0
    alone = [one._replace(tenant=bytes([index])) for index, one in enumerate(many)]
    assert schedule([*alone, other], 50, PLACES).preempt is None
    assert schedule([*alone[:3], many[3]._replace(priority=1), other], 50, PLACES).preempt == 3


def test_who_takes_no_part_keeps_its_place_and_may_lose_it() -> None:
    """A grammar holds it up; it will be in a step with the others."""
    held_up = [decoding()._replace(waits=True, tenant=b"a") for _ in range(4)]
    assert schedule([*held_up, newcomer(20)._replace(tenant=b"a")], 50, PLACES) == Schedule()
    assert schedule([*held_up, newcomer(20)._replace(tenant=b"b")], 50, PLACES).preempt == 3
    assert schedule([held_up[0], decoding(cached=32)], 0, PLACES).preempt == 0
    assert len(schedule([decoding()] * 6, 50, PLACES).grants) == 4, "a drafter's, of which most are done"


def test_what_does_not_fit_beside_its_own_tenants_texts_holds_up_no_other_tenant() -> None:
    """Or a key could keep others' prompts waiting for as long as its own text goes on."""
    own, large = decoding()._replace(tenant=b"a"), newcomer(200)._replace(tenant=b"a")
    other, small = decoding()._replace(tenant=b"b"), newcomer(3)
    everyone = [own, large, other, small._replace(tenant=b"a"), small._replace(tenant=b"b")]
    assert [grant.index for grant in schedule(everyone, 8, LIMITS).grants] == [0, 2, 4]
    assert [grant.index for grant in schedule(everyone[1:], 8, LIMITS).grants] == [2 - 1]


def of(tenant: bytes, cached: int) -> Candidate:
    return decoding(cached=cached)._replace(tenant=tenant)


def test_who_has_most_blocks_gives_some_up_to_another_tenants_prompt() -> None:
    """Else one key's texts that fill the pool keep another's requests waiting until they are at their end."""
    many = [of(b"a", 32 + 16 * index) for index in range(4)]  # 2, 3, 4 and 5 blocks
    other = newcomer(20)._replace(tenant=b"b")
    assert schedule([*many, other], 0, LIMITS).preempt == 0
    assert schedule([*many, other._replace(tenant=b"a")], 0, LIMITS).preempt is not None, "it grows"
    still = [one._replace(waits=True) for one in many]
    assert schedule([*still, other], 0, LIMITS).preempt == 0
    assert schedule([*still, other._replace(tenant=b"a")], 0, LIMITS).preempt is None
    assert schedule([*still, newcomer(16 * 13)._replace(tenant=b"b")], 0, LIMITS).preempt is None, "in vain"
    assert schedule([*still, other._replace(priority=1)], 0, LIMITS).preempt is None
    assert schedule([still[3], other], 0, LIMITS).preempt is None, "its only text goes on"
    third = of(b"c", 32)._replace(waits=True)
    assert schedule([third, *still, other], 0, LIMITS).preempt == 1, "of the one that has most"


def test_a_prompt_reserves_no_growth_for_a_tenant_that_has_more() -> None:
    many, other = [of(b"a", 20)] * 6, newcomer(20)._replace(tenant=b"b")
    granted = schedule([*many, other], 3, LIMITS).grants
    assert granted[-1].index == 6
    again = schedule([*many, other._replace(tenant=b"a")], 3, LIMITS).grants
    assert len(again) == 6


def test_who_grows_takes_from_who_has_more_and_else_from_its_own() -> None:
    """Another's short text, which loses least, is not what one key's many texts grow by."""
    short, many = of(b"b", 16), [of(b"a", 64), of(b"a", 48), of(b"a", 32)]
    assert schedule([*many, short._replace(waits=True)], 0, LIMITS).preempt == 2
    assert schedule([short, *(one._replace(waits=True) for one in many)], 0, LIMITS).preempt == 3
    alone = of(b"a", 64)._replace(waits=True)
    assert schedule([short, short, alone], 0, LIMITS).preempt == 1, "the one text of another goes on"
    equal = of(b"a", 16)._replace(waits=True)
    assert schedule([of(b"b", 32), equal], 0, LIMITS).preempt == 0, "who has fewer gives none"
    assert schedule([of(b"b", 30), equal._replace(cached=20, blocks=2)], 0, LIMITS).preempt is None
    assert schedule([of(b"b", 32), equal._replace(cached=20, blocks=2)], 0, LIMITS).preempt == 1
    late = of(b"c", 64)._replace(waits=True, priority=1)
    assert schedule([short, short, alone, late], 0, LIMITS).preempt == 3


def test_where_one_tenants_texts_outgrow_the_pool_another_is_read_and_goes_on() -> None:
    """In steps. And nobody is preempted for ever."""
    texts = {index: (of(b"a", 20), 100) for index in range(20)}  # and the tokens that are left of each
    came, told = 60, list[int]()  # steps: the other's prompt comes, its tokens are there
    for step in range(3000):
        if step == came:
            texts[99] = newcomer(40)._replace(tenant=b"b"), 50
        if not texts:
            break
        names, everyone = list(texts), [one for one, _ in texts.values()]
        got = schedule(everyone, 60 - sum(one.blocks for one in everyone), LIMITS)
        if got.preempt is not None:
            one, left = texts[names[got.preempt]]
            again = one.pending + one.cached, 0, 0, 0, one.preempted + 1
            texts[names[got.preempt]] = Candidate(*again, tenant=one.tenant), left
        for grant in got.grants:
            name = names[grant.index]
            one, left = texts.pop(name)
            is_told = grant.tokens == one.pending
            cached, pending = one.cached + grant.tokens, 1 if is_told else one.pending - grant.tokens
            if left > is_told:
                after = one._replace(pending=pending, cached=cached, blocks=max(one.blocks, -(-cached // 16)))
                texts[name] = after, left - is_told
            if is_told and name == 99:
                told.append(step)
    assert not texts
    assert told[0] < came + 20 and told[-1] < came + 100


tenants = st.lists(
    st.builds(
        lambda pending, cached, priority, preempted, waits, tenant: Candidate(
            *(pending, 0, cached, -(-cached // 16), preempted),
            priority=priority,
            waits=waits,
            tenant=tenant,
        ),
        st.integers(1, 80),
        st.sampled_from([0, 16, 40]),
        st.integers(0, 1),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from([b"a", b"b", b"c"]),
    ),
    max_size=12,
)


@given(tenants, st.integers(0, 30))
def test_giving_places_up_comes_to_an_end(everyone: list[Candidate], available: int) -> None:
    while sum(one.blocks > 0 for one in everyone) > PLACES.sessions:
        index = next(index for index, one in enumerate(everyone) if one.blocks)
        everyone[index] = everyone[index]._replace(cached=0, blocks=0)
    for _ in range(2 * len(everyone) + 1):
        got = schedule(everyone, available, PLACES)
        if got.preempt is None:
            begun = sum(everyone[grant.index].blocks == 0 for grant in got.grants)
            assert begun + sum(one.blocks > 0 for one in everyone) <= PLACES.sessions
            return
        victim = everyone[got.preempt]
        available += victim.blocks
        again = victim.pending + victim.cached, 0, 0, 0, victim.preempted + 1
        rest = {"priority": victim.priority, "waits": victim.waits, "tenant": victim.tenant}
        everyone[got.preempt] = Candidate(*again, **rest)
    raise AssertionError("preempted without an end")
