"""Rows that are not needed are left out, and the others are drawn as if they stood alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.noise import gumbel, row_key
from outrider.sampling.noisy_argmax import Ids
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw
from outrider.sampling.shaping import change, shape
from outrider.sampling.waves import NOT_DRAWN, in_waves

VOCAB = 199


def needed(after: Sequence[int | None], tokens: Sequence[int]) -> list[bool]:
    """Returns for each row if it is needed, by the tokens of all of them."""
    found: list[bool] = []
    for row, token in enumerate(after):
        found.append(token is None or row == 0 or (found[-1] and tokens[row - 1] == token))
    return found


@given(
    rows=st.lists(st.tuples(st.sampled_from([None, 0, 1]), st.integers(0, 1)), min_size=1, max_size=40),
    at_once=st.integers(1, 50),
)
def test_every_row_that_is_needed_is_drawn_once(rows: list[tuple[int | None, int]], at_once: int) -> None:
    after, tokens = [before for before, _ in rows], [token for _, token in rows]
    drawn: list[int] = []

    def pick(wave: Ids) -> Ids:
        assert list(wave) == sorted(wave)
        drawn.extend(wave.tolist())
        return np.array(tokens)[wave]

    found = in_waves(after, at_once, pick)
    assert len(set(drawn)) == len(drawn)
    assert found == [tokens[row] if row in drawn else NOT_DRAWN for row in range(len(rows))]
    wanted = {row for row, is_needed in enumerate(needed(after, tokens)) if is_needed}
    assert wanted <= set(drawn)
    if at_once == 1:
        assert wanted == set(drawn)


@pytest.mark.parametrize(
    ("at_once", "calls"), [(1, [3, 2, 1]), (3, [3, 2, 2]), (6, [5, 2]), (9, [6]), (12, [7])]
)
def test_as_many_rows_are_drawn_together_as_cost_no_more(at_once: int, calls: list[int]) -> None:
    """Three sessions of one, two and four rows; the third row of the last one rejects a draft."""
    sizes: list[int] = []

    def pick(wave: Ids) -> Ids:
        sizes.append(len(wave))
        return wave

    in_waves([None, None, 1, None, 3, 4, 0], at_once, pick)
    assert sizes == calls


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.8, 0.8, 1.0, 1e-40, 90.0, 100.0]),
            top_k=st.sampled_from([0, 0, 0, 3]),
            top_p=st.sampled_from([1.0, 1.0, 1.0, 0.5]),
            min_p=st.sampled_from([0.0, 0.0, 0.0, 0.1]),
            presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 1.5]),
            repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
            logit_bias=st.sampled_from([{}, {}, {}, {5: 8.0}]),
            seed=st.integers(0, 2**64 - 1),
        ),
        min_size=1,
        max_size=12,
    ),
    alike=st.booleans(),
    seed=st.integers(0, 2**31),
    drafts=st.integers(0, 5),
    limited=st.booleans(),
)
def test_a_step_s_rows_are_drawn_as_the_definition_says(
    kinds: list[SamplingParams], alike: bool, seed: int, drafts: int, limited: bool
) -> None:
    """Equal logits among them. Drafts that are right, half of the time."""
    limit = 150 if limited else VOCAB
    kinds = [kinds[0]] * len(kinds) if alike else kinds
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(kinds) * (drafts + 1), VOCAB, generator=generator) * 4).round()
    rows: list[Row] = []
    expected: list[int] = []
    for params in kinds:
        history, path = TokenCounts([1, 2], [3]), list[int]()
        for depth in range(drafts + 1):
            row = Row(params, seed + depth, history, tuple(path), path[-1] if path else None)
            own = logits[len(rows)][None, :limit].clone()
            change(own, [row])
            if not params.greedy:
                own = shape(own, [row]) + gumbel([row_key(params.seed, row.position)], limit)
            expected.append(int(own.argmax(-1)))
            rows.append(row)
            right = bool(torch.rand(1, generator=generator) < 0.5)
            path.append(expected[-1] if right else (expected[-1] + 1) % limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.sampling.noisy_argmax.ELEMENTS_AT_ONCE", 4 * limit)
        found = draw(logits, rows, limit).tolist()
    for token, wanted, is_needed in zip(
        found, expected, needed([row.after for row in rows], expected), strict=True
    ):
        assert token == wanted or (token == NOT_DRAWN and not is_needed)


def test_rows_of_rejected_drafts_are_left_out() -> None:
    params = SamplingParams(temperature=0.8)
    logits = torch.randn(60, 4096, generator=torch.Generator().manual_seed(1))
    plain = [Row(params, position, None, ()) for position in range(60)]
    first = draw(logits, plain).tolist()
    wrong = [row._replace(after=None if index % 5 == 0 else 4095) for index, row in enumerate(plain)]
    assert 4095 not in first
    found = draw(logits, wrong).tolist()
    assert found[::5] == first[::5]
    assert found.count(NOT_DRAWN) >= 36
