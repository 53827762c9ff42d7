"""The page in a real browser, on real processes. `make test-page` installs what that needs, but Chromium."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.api.keys import digest, new_key
from tests.e2e.conftest import END_SECONDS, Serve, start
from tests.tiny_models import reciting

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MILLISECONDS = 120_000  # only a hang can reach it
THOUGHT = ["<think>", "\n", "They", " ask", " of", " France:", " its", " capital", "</think>"]
ANSWER = ["\n\n", "Paris", " lies", " on", " the", " Seine."]
THINKS = (  # <think> stands in it, so that the model's answers are looked through for it
    "{% for message in messages %}{{ message.role }}: {% if message.reasoning_content %}<think>"
    "{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\n{% endfor %}Assistant:"
)
WIDE, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    missing = None if CHROMIUM else "no Chromium is installed: apt-get install chromium"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "Playwright is not installed: make test-page does that"
    if missing and os.environ.get("PAGE") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Service:
    """`outrider serve` with two drafters, for who has the key."""

    serve: Serve
    key: str

    @property
    def url(self) -> str:
        return self.serve.url


@pytest.fixture(scope="session")
def service(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Not started where there is no browser."""
    key = new_key()
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice sha256:{digest(key).hex()}\n")
    serve = start("--seed", "7", "--drafters", "2", "--no-compare", "--api-keys", str(file))
    yield Service(serve, key)
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(END_SECONDS) == 0, "".join(serve.said[-30:])


@pytest.fixture(scope="session")
def thinking(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service whose model thinks before it answers."""
    model = reciting(tmp_path_factory.mktemp("thinking"), [*THOUGHT, *ANSWER], THINKS)
    serve = start("--target", str(model), "--draft", str(model))
    yield serve.url
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(END_SECONDS) == 0, "".join(serve.said[-30:])


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, service: Service) -> Iterator[Open]:
    """Opens a page with the key. At the end nothing may have gone wrong in its console."""
    contexts, wrong = [], []

    def told(message: Any) -> None:
        refused = "responded with a status of 4" in message.text  # which the page shows
        if message.type == "error" and not refused:
            wrong.append(message.text)

    def open(
        view: str = "try",
        size: tuple[int, int] = WIDE,
        theme: str = "light",
        keyed: bool = True,
        url: str = service.url,
    ) -> Any:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=theme,
            permissions=["clipboard-read", "clipboard-write"],
        )
        contexts.append(context)
        context.set_default_timeout(MILLISECONDS)
        if keyed:
            context.add_init_script(f"sessionStorage.setItem('outrider-key', '{service.key}')")
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", told)
        page.goto(f"{url}/#{view}")
        if keyed and view != "live":
            page.wait_for_selector("#model option", state="attached")
        return page

    yield open
    for context in contexts:
        context.close()
    assert not wrong


def until(page: Any, expression: str) -> None:
    """Waits for it. Playwright's own wait_for_function is kept from running by the page's policy."""
    end = time.monotonic() + MILLISECONDS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(50)


def keep(page: Any, name: str) -> None:
    """Takes a picture for docs/, where that is wanted."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.wait_for_timeout(200)
        page.screenshot(path=Path(folder) / f"{name}.png")
