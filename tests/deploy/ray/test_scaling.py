"""Both pools follow the load, on a real Ray with a real Redis, and no stream notices."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from outrider.sampling.params import SamplingParams
from tests.deploy.ray.conftest import DEMO, Cluster, wait_until
from tests.e2e.conftest import DRAFT, Alone
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.ray, pytest.mark.process, pytest.mark.timeout(600)]

TOKENS = 100  # of an answer
PROMPTS = [f"import os\n\nPATHS = {[index] * 20}\n\ndef step_{index}(self" for index in range(4)]
MANY, ONE = 10, 1  # requests at a time
PAUSE_SECONDS = 0.5  # of a client that is alone, so that it is no load
TIMES_DEEPER = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft with more layers, which add nothing: it is slower, and every draft is right. So drafts pay on
    any machine, and sessions keep their drafters however busy it is."""
    folder = tmp_path_factory.mktemp("deeper")
    shutil.copytree(DRAFT, folder, dirs_exist_ok=True)
    draft = LlamaForCausalLM.from_pretrained(DRAFT)
    layers = draft.config.num_hidden_layers
    draft.config.num_hidden_layers = TIMES_DEEPER * layers
    deeper = LlamaForCausalLM(draft.config)
    deeper.load_state_dict(draft.state_dict(), strict=False)
    with torch.no_grad():
        for layer in deeper.model.layers[layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    deeper.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def application(cluster: Cluster, target: Path) -> Iterator[Cluster]:
    with RedisServer() as redis:
        cluster.serve_run(
            *(f"{key}={value}" for key, value in {**DEMO, "target": target}.items()),
            f"store={redis.url}",
            "verifier.max_replicas=2",
            "verifier.kv_memory=4MiB",  # four requests fit in
            "drafter.max_replicas=2",
            "drafter.kv_memory=1MiB",  # four as well
            "autoscaling.upscale_seconds=1",
            "autoscaling.downscale_seconds=2",
            "autoscaling.look_back_seconds=10.5",
        )
        yield cluster
        cluster.stop()


class Clients:
    """Ask again and again, each for a text that is known."""

    def __init__(self, application: Cluster, target: Path) -> None:
        self._application = application
        self._texts = _texts(target)
        self._prompts = itertools.cycle(PROMPTS)
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        self.wrong: list[str] = []
        self.right = 0
        self._pause = 0.0

    def be(self, count: int) -> None:
        """Returns when so many ask from now on. Many leave no pause, so they are a load on a fast machine."""
        self._pause = PAUSE_SECONDS if count == 1 else 0.0
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
        while not stop.wait(self._pause):
            try:
                answer = self._application.complete(prompt, TOKENS, temperature=0)
            except (AssertionError, httpx.HTTPError) as error:
                self.wrong.append(repr(error))
                return
            if answer["choices"][0]["text"] == self._texts[prompt]:
                self.right += 1
            else:
                self.wrong.append(answer["choices"][0]["text"])


def _texts(target: Path) -> dict[str, str]:
    """What the target alone writes."""
    alone, tokenizer = Alone(target), Tokenizer.from_file(str(target / "tokenizer.json"))

    def text(prompt: str) -> str:
        tokens = alone.tokens(tokenizer.encode(prompt).ids, SamplingParams(temperature=0.0), TOKENS)
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    return {prompt: text(prompt) for prompt in PROMPTS}


def test_both_pools_grow_and_shrink_with_the_load_and_no_stream_breaks(
    application: Cluster, target: Path
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
    clients = Clients(application, target)
    try:
        clients.be(MANY)
        wait_until(lambda: clients.wrong != [] or grown(), "both pools have grown")
        clients.be(ONE)
        wait_until(lambda: clients.wrong != [] or workers() == (1, 1), "both pools have shrunk")
        answered = clients.right
        wait_until(
            lambda: clients.wrong != [] or clients.right > answered + 1, "the last client is served on"
        )
    finally:
        clients.be(0)
    assert clients.wrong == []
