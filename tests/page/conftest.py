"""The page in a real browser, on real processes. `make test-page` installs what that needs, but Chromium."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo import pair
from tests.e2e.conftest import start
from tests.keyed_service import KeyedService, keyed_service
from tests.tiny_models import reciting, slow_demo_target

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


@pytest.fixture(scope="session")
def service(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedService]:
    """One with two drafters, whose drafts pay. Not started where there is no browser."""
    target = slow_demo_target(tmp_path_factory.mktemp("models") / pair.NAME)
    models = ("--target", str(target), "--draft", pair.NAME)
    with keyed_service(tmp_path_factory.mktemp("keys"), *models, "--drafters", "2") as made:
        yield made


@pytest.fixture(scope="session")
def thinking(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service whose model thinks before it answers."""
    model = reciting(tmp_path_factory.mktemp("thinking"), [*THOUGHT, *ANSWER], THINKS)
    serve = start("--target", str(model), "--draft", str(model))
    yield serve.url
    serve.end()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, service: KeyedService) -> Iterator[Open]:
    """Opens a page with the key. At the end nothing may have gone wrong in its console, and it may have asked
    nobody else."""
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
        page.on("request", lambda request: request.url.startswith(f"{url}/") or wrong.append(request.url))
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


def keep(page: Any, name: str, seconds: float = 0.2) -> None:
    """Takes a picture for docs/, where that is wanted, after so long."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.wait_for_timeout(1000 * seconds)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
