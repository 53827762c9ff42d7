"""How many masks stand behind a trunk."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drafter.drafting import Drafting, Part
from drafter.masks import MOST_GUESSES, mask_token, with_masks
from drafter.session import DraftSession, DraftSpec, Guess
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.state_slots import MOST_DRAFTS, StateSlots
from outrider.errors import StartupError
from outrider.sampling.params import SamplingParams
from outrider.sampling.token_counts import TokenCounts
from outrider.wire.session import SessionParams

MASK = 99
PROMPT = (1, 2, 3)


def trunk(pool: BlockPool, window: int = 20, max_tokens: int = 50, read: int = 3) -> Part:
    params = SessionParams(PROMPT, SamplingParams(), max_tokens)
    session = DraftSession(DraftSpec(b"s" * 16, params, (), b"", 100), window)
    drafting = Drafting(session, None)
    drafting.table = pool.open(session.log)
    pool.extend(drafting.table, read)
    return Part(drafting, 0, PROMPT[:read], 1)


def count(part: Part, pool: BlockPool, most_tokens: int = 100) -> int:
    (masked,) = with_masks([part], MASK, pool, most_tokens)
    assert masked.tokens == part.tokens + (MASK,) * masked.masks
    assert masked.rows == part.rows + masked.masks and masked.first == part.first
    assert part.drafting.table.length == len(masked.tokens)
    return masked.masks


@pytest.mark.parametrize(
    ("told", "masks"),
    [
        ({}, MOST_GUESSES - 1),
        ({"window": 3}, 2),
        ({"window": 1}, 0),
        ({"max_tokens": 3}, 1),  # of three the last is the target's own
        ({"read": 2}, 0),  # there is text to read yet
    ],
)
def test_as_many_as_guesses_are_wanted(told: dict[str, Any], masks: int) -> None:
    pool = BlockPool(8)
    assert count(trunk(pool, **told), pool) == masks


def test_of_a_model_with_recurrent_states_no_more_than_can_be_taken_back() -> None:
    """More had ended the drafter."""
    pool = BlockPool(8, states=StateSlots(4, 8, 16))
    part = trunk(pool, window=100, max_tokens=100)
    drafted = [Guess(1, 0.9, 0.9, 0, 0.9)] * (MOST_DRAFTS - 3)
    part.drafting.session.drafted += drafted
    pool.extend(part.drafting.table, len(drafted))
    part = replace(part, tokens=(*PROMPT, *[1] * len(drafted)))
    assert count(part, pool) == 2


def test_none_where_a_draw_depends_on_those_before_it() -> None:
    pool = BlockPool(8)
    part = trunk(pool)
    part.drafting.counts = TokenCounts(PROMPT, ())
    assert count(part, pool) == 0


def test_only_what_a_step_and_the_pool_have_room_for() -> None:
    pool = BlockPool(8)
    first, second = trunk(pool), trunk(pool)
    masked = with_masks([first, second], MASK, pool, 6 + 9)
    assert [part.masks for part in masked] == [7, 2]
    small = BlockPool(1, 4)
    assert count(trunk(small), small) == 1


def configuration(mask: object) -> Any:
    return SimpleNamespace(pard_token=mask, get_text_config=lambda: SimpleNamespace(vocab_size=100))


def test_the_mask_is_that_of_the_configuration() -> None:
    assert mask_token(configuration(99)) == 99
    assert mask_token(SimpleNamespace()) is None
    for wrong in (100, -1, "99", [99], True):
        with pytest.raises(StartupError, match="which is no id of its tokens; correct it, or remove it"):
            mask_token(configuration(wrong))
