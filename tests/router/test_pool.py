"""A few are drawn of many."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.pool import Pool, Pools


@given(st.integers(0, 12), st.integers(0, 12), st.randoms(use_true_random=False))
def test_those_that_are_drawn_are_different_members(count: int, most: int, chance: random.Random) -> None:
    pool: Pool[int] = Pool()
    for member in range(count):
        pool.add(member)
    drawn = pool.draw(most, chance.randrange)
    assert len(set(drawn)) == len(drawn) == min(count, most)
    assert set(drawn) <= set(pool)


def test_each_member_is_drawn_as_often_as_any_other() -> None:
    pool: Pool[int] = Pool()
    for member in range(10):
        pool.add(member)
    chance = random.Random(3)
    counts = Counter(one for _ in range(10_000) for one in pool.draw(3, chance.randrange))
    assert all(abs(count - 3_000) < 200 for count in counts.values()) and len(counts) == 10


@given(st.lists(st.integers(0, 20)))
def test_a_pool_is_a_set(numbers: list[int]) -> None:
    """A number that is there goes, one that is not comes."""
    pool: Pool[int] = Pool()
    there: set[int] = set()
    for number in numbers:
        if number in there:
            pool.remove(number)
        else:
            pool.add(number)
        there ^= {number}
        assert set(pool) == there and len(pool) == len(there)


def test_pools_without_members_are_gone() -> None:
    pools: Pools[str, int] = Pools()
    pools.add("a", 1)
    pools.add("b", 2)
    pools.remove("a", 1)
    assert list(pools) == ["b"] and len(pools["a"]) == 0
