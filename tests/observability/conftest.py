"""One `outrider serve`, for who has a key, that all tests of this room look at."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from tests.keyed_service import KeyedService, keyed_service
from tests.plain_http import HTTP

PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n\n\ndef walk(", "for line in lines:\n")


class Service(KeyedService):
    def wait_until_well(self) -> None:
        """On a busy machine a drafter may not reach its verifier at first: that is told for half a minute."""
        while "degraded" in HTTP.get(f"{self.url}/health", timeout=60).text:
            time.sleep(0.2)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Some requests at a time are answered for as long as this lasts, and one in two is refused."""
        over = threading.Event()
        headers = {"authorization": f"Bearer {self.key}"}

        def ask(prompt: str) -> None:
            with httpx.Client(base_url=self.url, headers=headers, timeout=None) as client:
                while not over.is_set():
                    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0}
                    for wanted, status in ((body, 200), ({**body, "max_tokens": -1}, 400)):
                        with suppress(httpx.TransportError):  # the service may end first
                            assert client.post("/v1/completions", json=wanted).status_code == status

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with keyed_service(tmp_path_factory.mktemp("keys")) as made:
        yield Service(made.serve, made.key)
