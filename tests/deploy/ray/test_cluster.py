"""What `make cluster` makes of a Serve that is slow to start, or does not start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from deploy.cluster import START_SECONDS, START_TRIES, see_through, try_again
from outrider.errors import StartupError

KILLED = "The actor is dead because it was killed by `ray.kill`."


def replaced() -> None:
    raise RayActorError(error_msg=f"The actor died.\n\tclass_name: P\n{KILLED}")


def too_slow() -> None:
    raise TimeoutError("HTTP proxies not available after 60s.")


@pytest.mark.parametrize("step", [replaced, too_slow])
def test_a_proxy_that_was_replaced_or_is_slow_is_waited_for(step: Callable[[], None]) -> None:
    asked = []

    def is_done() -> bool:
        asked.append(None)
        if len(asked) == 2:
            raise GetTimeoutError("the controller is busy")
        return len(asked) == 4

    see_through(step, is_done, clock=lambda: 0, pause=lambda seconds: None)
    assert len(asked) == 4


def test_what_is_never_ready_ends_with_a_sentence() -> None:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(StartupError) as raised:
        see_through(replaced, lambda: False, clock=lambda: now[0], pause=pause)
    assert raised.value.message == f"Ray Serve is not ready after 300 seconds: {KILLED}"
    assert now[0] >= START_SECONDS


def test_what_is_refused_is_not_waited_for() -> None:
    def refused() -> None:
        raise RuntimeError("no such option")

    with pytest.raises(RuntimeError, match="no such option"):
        see_through(refused, lambda: pytest.fail("it was asked for"))


@pytest.mark.parametrize("slow", [1, START_TRIES - 1])
def test_a_ray_that_is_slow_to_start_is_started_again(slow: int) -> None:
    did: list[str] = []

    def start() -> None:
        did.append("start")
        if did.count("start") <= slow:
            raise RuntimeError("The current node timed out during startup.")

    try_again(start, lambda: did.append("give up"))
    assert did == ["start", "give up"] * slow + ["start"]


@pytest.mark.parametrize(("why", "tries"), [("Timed out waiting for file a", START_TRIES), ("no room", 1)])
def test_a_ray_that_does_not_start_is_told_in_a_sentence(why: str, tries: int) -> None:
    did: list[str] = []

    def start() -> None:
        did.append("start")
        raise RuntimeError(f"a trace\n{why}")

    with pytest.raises(StartupError) as raised:
        try_again(start, lambda: did.append("give up"))
    assert raised.value.message == f"Ray does not start: {why}"
    assert did.count("start") == tries
