"""Options and groups of them: what is read from their fields."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field

import pytest

from outrider.errors import StartupError, WrongOption
from outrider.options.engine import EngineOptions, StepLimits
from outrider.options.option import build, check, option, options, same, words


@dataclass(frozen=True)
class Inner:
    depth: int = option(1, "How deep.", least=1, most=9)
    name: str | None = option(None, "Of what.", choices=("a", "b"))

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Outer:
    path: str = option(help="Where.")
    inner: Inner = field(default=Inner(depth=3))
    quiet: bool = option(False, "Say nothing.")
    eager: bool = option(True, "Go ahead.", negated=True)
    limit: int = same(Inner, "depth", 5)
    found: str | None = None  # no option

    def __post_init__(self) -> None:
        check(self)


def test_a_configurations_options_are_its_own_and_those_of_its_groups() -> None:
    defaults = {each.name: each.default for each in options(Outer)}
    assert defaults == {
        "path": MISSING,
        "depth": 3,
        "name": None,
        "quiet": False,
        "eager": True,
        "limit": 5,
    }
    assert {each.name: each.type for each in options(Outer)}["name"] == str | None


def test_a_configuration_is_built_of_flat_values() -> None:
    assert build(Outer, {"path": "p"}) == Outer("p", Inner(3))
    told = build(Outer, {"path": "p", "name": "b", "quiet": True, "found": "x", "of another": 1})
    assert told == Outer("p", Inner(3, "b"), quiet=True, found="x")


def test_a_command_line_says_what_is_not_as_by_default() -> None:
    assert words(Outer("p")) == ["--path", "p"]
    told = Outer("p", Inner(4, "a"), quiet=True, eager=False)
    assert words(told) == ["--path", "p", "--depth", "4", "--name", "a", "--quiet", "--no-eager"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"depth": 0}, "--depth must be from 1 to 9, not 0"),
        ({"limit": 10}, "--limit must be from 1 to 9, not 10"),
        ({"name": "c"}, "--name must be one of a, b, not 'c'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_flag(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(StartupError) as refused:
        build(Outer, {"path": "p", **given})
    assert refused.value.message == sentence


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"device": "tpu"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"kv_memory": "1000"}, "kv_memory"),
        ({"threads": 0}, "threads"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ],
)
def test_an_engine_that_cannot_be(given: dict[str, object], option: str) -> None:
    with pytest.raises(WrongOption) as refused:
        build(EngineOptions, given)
    assert refused.value.option == option


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_time_is_finite(seconds: float) -> None:
    @dataclass(frozen=True)
    class Patience:
        seconds: float = option(1.0, "How long.", least=0)

        def __post_init__(self) -> None:
            check(self)

    said = "at least 0, and a finite number, not inf" if seconds > 0 else f"at least 0, not {seconds}"
    with pytest.raises(StartupError, match=f"--seconds must be {said}"):
        Patience(seconds)


def test_a_step_holds_a_chunk() -> None:
    with pytest.raises(StartupError, match="--max-batch-tokens must be at least 256, the prefill chunk"):
        StepLimits(max_batch_tokens=9)
