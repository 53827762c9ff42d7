"""Both pools follow the load, on a real Ray with a real Redis, and no stream notices."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.deploy.ray.conftest import DEMO, Cluster, wait_until
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.ray, pytest.mark.process, pytest.mark.timeout(600)]

TOKENS = 40  # of an answer
MANY, ONE = 8, 1  # requests at a time
# Long beside their answers: what requests hold of a pool depends on their number, not on their pace.
PROMPTS = [f"import os\n\nPATHS = {[index] * 138}\n\ndef step_{index}(self" for index in range(MANY)]
REST = 4  # times an answer's time, for which one client rests: it is no load, however slow its answers are


@pytest.fixture(scope="module")
def application(cluster: Cluster) -> Iterator[Cluster]:
    with RedisServer() as redis:
        cluster.serve_run(
            *(f"{key}={value}" for key, value in DEMO.items()),
            f"store={redis.url}",
            "verifier.max_replicas=2",
            "verifier.compare=false",  # drafts do not rest here, however busy this machine is
            "verifier.kv_memory=6400KiB",  # three requests fit in
            "drafter.max_replicas=2",
            "drafter.kv_memory=1MiB",  # two, which fill it
            "autoscaling.upscale_seconds=1",
            "autoscaling.downscale_seconds=2",
            "autoscaling.look_back_seconds=10.5",
        )
        yield cluster
        cluster.stop()


class Clients:
    """Ask again and again, each for a text that is known."""

    def __init__(self, application: Cluster, expected: Callable[..., str]) -> None:
        self._application = application
        self._texts = {prompt: expected(prompt, TOKENS, temperature=0.0) for prompt in PROMPTS}
        self._prompts = itertools.cycle(PROMPTS)
        self._rest = 0
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        self.wrong: list[str] = []
        self.right = 0

    def be(self, count: int) -> None:
        """Returns when so many ask from now on, all the time if they are several."""
        self._rest = REST if count == ONE else 0
        while len(self._threads) < count:
            stop = threading.Event()
            thread = threading.Thread(target=self._ask, args=(next(self._prompts), stop))
            self._threads.append((thread, stop))
            thread.start()
        leaving, self._threads = self._threads[count:], self._threads[:count]
        for _, stop in leaving:
            stop.set()
        for thread, _ in leaving:
            thread.join()

    def _ask(self, prompt: str, stop: threading.Event) -> None:
        took = 0.0
        while not stop.wait(self._rest * took):
            began = time.monotonic()
            try:
                answer = self._application.complete(prompt, TOKENS, temperature=0)
            except (AssertionError, httpx.HTTPError) as error:
                self.wrong.append(repr(error))
                return
            took = time.monotonic() - began
            if answer["choices"][0]["text"] == self._texts[prompt]:
                self.right += 1
            else:
                self.wrong.append(answer["choices"][0]["text"])


def test_both_pools_grow_and_shrink_with_the_load_and_no_stream_breaks(
    application: Cluster, expected: Callable[..., str]
) -> None:
    def workers() -> tuple[int, int]:
        return application.workers("verifier"), application.workers("drafter")

    largest = (0, 0)

    def grown() -> bool:
        """Not at one time: a drafter that does not help here goes again."""
        nonlocal largest
        now = workers()
        largest = (max(largest[0], now[0]), max(largest[1], now[1]))
        return largest == (2, 2)

    assert workers() == (1, 1)
    clients = Clients(application, expected)
    try:
        clients.be(MANY)
        wait_until(lambda: clients.wrong != [] or grown(), "both pools have grown")
        clients.be(ONE)
        wait_until(
            lambda: clients.wrong != [] or workers() == (1, 1),
            lambda: f"both pools have shrunk: {application.records()}",
        )
        answered = clients.right
        wait_until(
            lambda: clients.wrong != [] or clients.right > answered + 1, "the last client is served on"
        )
    finally:
        clients.be(0)
    assert clients.wrong == []
