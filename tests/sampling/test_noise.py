"""The shared noise: the same everywhere, and as random as it must be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.noise import gumbel, mix64, mix64_tensor, row_key
from tests.goodness_of_fit import chi_square, uniform

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def reference_bits(seed: int, position: int, token: int) -> int:
    """Written down a second time, from the documentation, in Python's own integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    key = mix((mix(seed & MASK) + (position + 1) * GOLDEN) & MASK)
    return mix((key + (token + 1) * GOLDEN) & MASK)


def reference_gumbel(seed: int, position: int, token: int) -> float:
    u = ((reference_bits(seed, position, token) >> 12) + 0.5) * 2.0**-52
    return float(np.float32(-math.log(-math.log(u))))


GOLDEN_VALUES = [  # seed, position, token, bits, gumbel
    (0, 0, 0, 0xA706DD2F4D197E6F, 0.8509171605110168),
    (1, 0, 0, 0x55C55969ED403149, -0.08938146382570267),
    (0, 1, 0, 0x46B73E79F0C37C00, -0.25193193554878235),
    (0, 0, 1, 0xB382A305F4414F5E, 1.0357928276062012),
    (2**64 - 1, 131071, 151935, 0xD41101A6847F32DE, 1.669836401939392),
    (0x123456789ABCDEF0, 4095, 31999, 0xCD833A60E1F13984, 1.5156285762786865),
]


@pytest.mark.parametrize(("seed", "position", "token", "bits", "value"), GOLDEN_VALUES)
def test_golden_values(seed: int, position: int, token: int, bits: int, value: float) -> None:
    assert reference_bits(seed, position, token) == bits
    assert gumbel([row_key(seed, position)], 1, offset=token).item() == pytest.approx(value, abs=0, rel=1e-7)


def test_mix64_is_the_published_function() -> None:
    """The first outputs of SplitMix64 seeded with 1234567, as listed in its reference implementations."""
    outputs = [mix64(1234567 + (i + 1) * GOLDEN) for i in range(5)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=50))
def test_tensor_and_integers_mix_alike(values: list[int]) -> None:
    signed = torch.tensor(np.array(values, dtype=np.uint64).view(np.int64))
    mixed = mix64_tensor(signed).numpy().view(np.uint64)
    assert [int(value) for value in mixed] == [mix64(value) for value in values]


@settings(max_examples=40)
@given(st.integers(0, MASK), st.integers(0, 2**31), st.integers(0, 2**20), st.integers(1, 300))
def test_torch_numpy_and_math_agree(seed: int, position: int, offset: int, vocab: int) -> None:
    found = gumbel([row_key(seed, position)], vocab, offset=offset)[0].numpy()
    bits = np.array([reference_bits(seed, position, offset + x) for x in range(vocab)], dtype=np.uint64)
    u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    assert np.all((u > 0) & (u < 1))
    by_numpy = (-np.log(-np.log(u))).astype(np.float32)
    by_math = np.array([reference_gumbel(seed, position, offset + x) for x in range(vocab)], dtype=np.float32)
    # the logarithms of different libraries may differ in the last place
    np.testing.assert_array_max_ulp(found, by_numpy, maxulp=1)
    np.testing.assert_array_max_ulp(found, by_math, maxulp=1)


def test_libraries_hardly_ever_differ() -> None:
    keys = [row_key(9, position) for position in range(40)]
    found = gumbel(keys, 5000).numpy()
    bits = np.array([[reference_bits(9, p, x) for x in range(5000)] for p in range(40)], dtype=np.uint64)
    u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    assert (found != (-np.log(-np.log(u))).astype(np.float32)).sum() <= 2


def test_a_number_depends_on_nothing_but_its_key_and_token() -> None:
    keys = [row_key(5, position) for position in range(17)]
    whole = gumbel(keys, 1003)
    for row in (0, 7, 16):
        assert torch.equal(gumbel([keys[row]], 1003)[0], whole[row])
        assert torch.equal(gumbel([keys[row]], 77, offset=501)[0], whole[row, 501:578])
    assert torch.equal(gumbel(keys[::-1], 1003), whole.flip(0))
    assert gumbel([], 5).shape == (0, 5)


def test_extremes_are_finite() -> None:
    u = torch.tensor([0.5, 2.0**52 - 0.5], dtype=torch.float64) * 2.0**-52  # the smallest and the largest u
    assert torch.isfinite((-(-u.log()).log()).float()).all()


def uniforms(seeds: range, positions: range, tokens: int) -> np.ndarray:
    keys = [row_key(seed, position) for seed in seeds for position in positions]
    values = gumbel(keys, tokens).double().numpy()
    return np.exp(-np.exp(-values)).reshape(len(seeds), len(positions), tokens)


def test_the_distribution_is_gumbel() -> None:
    sample = uniforms(range(10), range(20), 1000).ravel()
    assert uniform(sample) > 1e-4
    counts, _ = np.histogram(sample, bins=256, range=(0, 1))
    assert chi_square(counts) > 1e-4


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "position", "token"])
def test_neighbours_are_independent(axis: int) -> None:
    sample = np.moveaxis(uniforms(range(40), range(40), 120), axis, 0)
    first, second = sample[:-1].ravel(), sample[1:].ravel()
    correlation = np.corrcoef(first, second)[0, 1]
    assert abs(correlation) < 4 / math.sqrt(first.size)
    joint, _, _ = np.histogram2d(first, second, bins=16, range=[[0, 1], [0, 1]])
    assert chi_square(joint.ravel()) > 1e-4


def test_consecutive_seeds_and_positions_do_not_share_rows() -> None:
    keys = {row_key(seed, position) for seed in range(200) for position in range(200)}
    assert len(keys) == 40_000
