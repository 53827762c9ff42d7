"""Prompts as numbers: what two of them have in common."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from router.drafter_merits import SEEN_STEPS, DrafterMerits, Outcome
from router.request_features import ANY, DIMENSIONS, TAIL, features

CODE, CHAT = range(100, 160), range(5000, 5060)


def prompt(words: range, seed: int, length: int = 80) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.choice(words) for _ in range(length))


def test_prompts_of_the_same_words_are_more_alike_than_others() -> None:
    code, chat = ([features(prompt(words, seed)) for seed in range(8)] for words in (CODE, CHAT))
    within = [float(one @ other) for kind in (code, chat) for one, other in combinations(kind, 2)]
    across = [float(one @ other) for one in code for other in chat]
    assert np.mean(across) < 0.45 < 0.6 < np.mean(within)
    assert float(code[0] @ ANY) == pytest.approx(0.5)  # a request of which nothing is known is a bit like all


@pytest.mark.parametrize("tokens", [(), (0,), (2**32 - 1,) * 9, tuple(range(10**5))])
def test_every_prompt_is_a_vector_of_length_one(tokens: tuple[int, ...]) -> None:
    found = features(tokens)
    assert found.shape == (DIMENSIONS,) and np.isfinite(found).all()
    assert float(np.linalg.norm(found)) == pytest.approx(1.0 if tokens else 0.35**0.5, rel=1e-4)


def test_the_end_of_a_prompt_counts_and_its_length() -> None:
    tail = prompt(CODE, 1, TAIL)
    long, longer = features((*prompt(CHAT, 1, 600), *tail)), features((*prompt(CODE, 2, 800), *tail))
    assert np.allclose(long, longer)
    assert 0.85 < float(long @ features(tail)) < 0.95


def test_a_trial_that_ends_at_once_leaves_what_is_known_of_other_kinds() -> None:
    merits, drafter = DrafterMerits(), ("d", 1)
    code, chat = features(prompt(CODE, 1)), features(prompt(CHAT, 1))
    for _ in range(SEEN_STEPS):
        merits.observe("t", drafter, Outcome(4, 12.0), code)
        merits.observe("t", drafter, Outcome(4), chat)
    before = merits.of("t", drafter, chat)
    assert before is not None and before < 0.2
    merits.tried("t", drafter, chat)
    assert merits.of("t", drafter, chat) is None  # it is judged anew
    merits.observe("t", drafter, Outcome(2), chat)
    known = merits.of("t", drafter, features(prompt(CODE, 2)))
    assert merits.of("t", drafter, chat) is None and known is not None and known > 1.5
