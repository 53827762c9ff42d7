from __future__ import annotations

import math

import pytest

from outrider.errors import InvalidRequest
from outrider.sampling.params import BIASES, MAX_BIASES, RANGES, SamplingParams
from outrider.sampling.range import Range

ENDS = [(name, allowed.low, allowed.high, allowed.above) for name, allowed in RANGES.items()]


@pytest.mark.parametrize(("name", "low", "high", "above"), ENDS)
def test_a_parameter_takes_its_range_and_nothing_beyond(
    name: str, low: float, high: float, above: bool
) -> None:
    SamplingParams(**{name: high}).validate(vocab_size=8)
    if not above:
        SamplingParams(**{name: low}).validate(vocab_size=8)
    for value in (low if above else low - 1, high + 1, math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidRequest, match=f"^{name} must be ") as refused:
            SamplingParams(**{name: value}).validate(vocab_size=8)
        assert refused.value.field == name


def test_every_parameter_has_a_range() -> None:
    assert RANGES.keys() | {"logit_bias"} == SamplingParams.__dataclass_fields__.keys()
    with pytest.raises(InvalidRequest, match=r"logit_bias must be in \[-100, 100\], not 101"):
        SamplingParams(logit_bias={3: BIASES.high + 1}).validate(vocab_size=8)


def test_biases_are_counted_before_they_are_looked_at() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0)).validate(vocab_size=MAX_BIASES)
    with pytest.raises(InvalidRequest, match=r"^logit_bias must have at most 1024 token ids, not 1025$"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), math.nan)).validate(vocab_size=8)


def test_a_range_in_words() -> None:
    assert str(Range(0, 1, above=True)) == "in (0, 1]"
    assert Range(0, 1, above=True).json_schema() == {"exclusiveMinimum": 0, "maximum": 1}
    assert Range(-2, 2).json_schema() == {"minimum": -2, "maximum": 2}
