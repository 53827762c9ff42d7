"""One `outrider serve`, for who has a key, that all tests of this room look at."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
import pytest

from router.api.keys import digest, new_key
from tests.e2e.conftest import END_SECONDS, Serve, start

PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n\n\ndef walk(", "for line in lines:\n")


@dataclass
class Service:
    """It, and the key."""

    serve: Serve
    key: str

    @property
    def url(self) -> str:
        return self.serve.url

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
    key = new_key()
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice sha256:{digest(key).hex()}\n")
    serve = start("--seed", "7", "--no-compare", "--api-keys", str(file))
    yield Service(serve, key)
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(END_SECONDS) == 0, "".join(serve.said[-30:])
