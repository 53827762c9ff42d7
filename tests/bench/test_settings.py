from __future__ import annotations

import pytest

from outrider.errors import StartupError
from outrider_cli.bench.placing import Cores
from outrider_cli.bench.services import behind
from outrider_cli.bench.settings import Settings, numbers, parse_cores, words
from outrider_cli.children import Models
from outrider_cli.supervisor import ChildSpec

PAIR = Models("t", "d", "t")


def test_a_plan_measures_all_ways_unless_told_otherwise() -> None:
    assert Settings(models=PAIR).ways == (
        "plain",
        "plain, all cores",
        "lock-step",
        "streaming",
        "transformers",
        "assisted",
        "assisted, tuned",
    )
    assert Settings(models=PAIR, peers=False, lock_step=False).ways == (
        "plain",
        "plain, all cores",
        "streaming",
    )
    shared = Cores(target=(0,), draft=(0,))
    assert Settings(models=PAIR, peers=False, cores=shared).ways == ("plain", "lock-step", "streaming")
    assert Settings(models=PAIR, peers=False, chains=True).ways[-2:] == ("streaming, chains", "streaming")
    assert Settings(models=PAIR, peers=False, paths=True).ways[-2:] == ("streaming, paths", "streaming")
    other = Settings(url="http://h", rtts_ms=(0.0,))
    assert (other.ways, other.reference) == (("server",), "server")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"models": PAIR, "workloads": ("poems",)}, "--workload poems is not one of code, prose, random"),
        ({}, "--url measures a server that is there"),
        ({"models": PAIR, "url": "http://h", "rtts_ms": (0.0,)}, "--url measures a server that is there"),
        ({"url": "http://h"}, "--rtt is between a drafter and a verifier of this run"),
    ],
)
def test_a_plan_that_cannot_be(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        Settings(**arguments)  # type: ignore[arg-type]


def test_lists() -> None:
    assert numbers("--rtt", "0, 2.5,20,0", float, 0) == (0, 2.5, 20)
    assert words("code, prose,code") == ("code", "prose")
    with pytest.raises(StartupError, match="--streams must be numbers with commas between them, not '1;2'"):
        numbers("--streams", "1;2", int, 1)
    for text in ("0", "inf", "nan"):
        with pytest.raises(StartupError, match="--streams must be at least 1"):
            numbers("--streams", text, float, 1)


def test_cores() -> None:
    assert parse_cores("0,1/3", []) == Cores((0, 1), (3,))
    assert parse_cores("any", [4, 5]) == Cores((4,), (5,), pinned=False)
    assert parse_cores(None, [2, 5, 7]) == Cores((2,), (5, 7))
    assert parse_cores(None, [4]) == Cores((4,), (4,))
    assert parse_cores("0,1/1,3", []).all == (0, 1, 3)
    assert parse_cores("any", [4, 5], divided=False) == Cores((4, 5), (4, 5), pinned=False)
    assert parse_cores(None, [4, 5], divided=False) == Cores((4, 5), (4, 5))
    assert parse_cores("4/5", [4, 5], divided=False) == Cores((4,), (5,))
    for text in ("0", "a/b", "0/1/2", "/"):
        with pytest.raises(StartupError, match="--cores must be TARGET/DRAFT"):
            parse_cores(text, [])
    for text in ("4/6", "-1/4", "4/" + "9" * 30):
        with pytest.raises(StartupError, match="names others than this process may use, which are 4,5"):
            parse_cores(text, [4, 5])


def test_a_child_is_put_on_cores() -> None:
    child = ChildSpec("drafter", "drafter", ("python", "x"), restart=True)
    pinned, free = Cores((0, 2), (1,)), Cores((0, 2), (1,), pinned=False)
    assert behind(child, pinned.prefix(pinned.target)).command == (
        "taskset",
        "--cpu-list",
        "0,2",
        "python",
        "x",
    )
    assert behind(child, free.prefix(free.target)) == child
