"""What a user does on the page, and what it shows of that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.keyed_service import KeyedService
from tests.page.conftest import ANSWER, PHONE, THOUGHT, Open, keep, until

pytestmark = pytest.mark.process

PROMPT = "def fibonacci(n):\n"


def ask(page: Any, prompt: str = PROMPT, **fields: str) -> None:
    """Fills in the form, and sends it by keyboard."""
    page.get_by_text("Completion", exact=True).click()
    page.fill("#prompt", prompt)
    for name, value in {"max_tokens": "96", "temperature": "0", **fields}.items():
        page.fill(f"#{name}", value)
    page.press("#prompt", "Control+Enter")


def answered(page: Any) -> None:
    page.wait_for_selector(".figures >> text=seed")


def texts(page: Any) -> list[str]:
    return [str(text) for text in page.locator(".answer").all_text_contents()]


def same_by_http(service: KeyedService, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 96, "temperature": 0, "return_speculation": True, **fields}
    answer = httpx.post(
        f"{service.url}/v1/completions", json=asked, headers={"x-api-key": service.key}, timeout=120
    )
    told: dict[str, Any] = answer.raise_for_status().json()
    return told


def test_an_answer_streams_in_the_colours_that_the_statistics_tell(
    open_page: Open, service: KeyedService
) -> None:
    page = open_page()
    ask(page, temperature="0.8", seed="5", max_tokens="160")
    until(page, "document.querySelectorAll('.answer .token').length > 4")
    answered(page)
    whole = same_by_http(service, temperature=0.8, seed=5, max_tokens=160)
    assert texts(page) == [whole["choices"][0]["text"]]
    kinds = ("accepted", "correction", "bonus", "plain")
    count = {kind: page.locator(f".answer .{kind}").count() for kind in kinds}
    assert sum(count.values()) == whole["usage"]["completion_tokens"]
    assert count["accepted"] > 0
    legend = [int(one) for one in page.locator(".legend b").all_text_contents()]
    *kept, _, _, _ = legend  # of each drafter, if another one took over
    assert sum(legend) == sum(count.values()) and sum(kept) == count["accepted"]
    figures = page.locator(".figures").text_content()
    assert "tokens a step with drafts" in figures and "of drafts kept" in figures
    colour = "one => getComputedStyle(one).backgroundColor"
    present = [kind for kind in kinds if count[kind]]
    shown = {page.locator(f".answer .{kind}").first.evaluate(colour) for kind in present}
    assert len(shown) == len(present)
    if count["correction"]:
        page.locator(".answer .correction").last.hover()
    keep(page, "page")


def test_a_token_is_told_of_by_pointer_and_by_keyboard(open_page: Open) -> None:
    page = open_page()
    ask(page)
    answered(page)
    words = {
        "accepted": ("guessed by a drafter, and kept", "sure"),
        "correction": ("in the place of a wrong guess", "sure"),
        "bonus": ("after guesses that were all kept",),
        "plain": ("without a guess",),
    }
    assert page.locator(".answer .accepted").count() > 0
    for kind, told in words.items():
        if page.locator(f".answer .{kind}").count():
            page.locator(f".answer .{kind}").first.hover()
            shown = page.locator("#detail").text_content()
            assert all(each in shown for each in (*told, "step ", "after ")), (kind, shown)
    page.locator(".answer").focus()
    page.keyboard.press("Home")
    first = page.locator("#detail").text_content()
    page.keyboard.press("ArrowRight")
    assert page.locator("#detail").text_content() != first
    assert page.locator(".token.chosen").count() == 1


def test_what_the_model_thinks_is_dimmed_and_folded(open_page: Open, thinking: str) -> None:
    page = open_page(url=thinking)
    page.fill("#prompt", "What is the capital of France?")
    page.press("#prompt", "Control+Enter")
    answered(page)
    fold = page.locator(".answer details")
    assert fold.locator(".token").all_text_contents() == [*THOUGHT, ANSWER[0]]
    assert page.locator(".answer > .token").all_text_contents() == [*ANSWER[1:], ""]
    assert fold.locator("summary").text_content() == f"Reasoning, {len(THOUGHT)} tokens"
    assert not fold.locator(".token").first.is_visible()
    assert page.locator(".answer .cut").count() == 0
    fold.locator("summary").click()
    assert fold.locator(".token").first.is_visible()
    colour = "one => getComputedStyle(one).color"
    shown = page.locator(".answer > .token").first.evaluate(colour)
    assert fold.locator(".token").first.evaluate(colour) != shown
    assert check(page, axe()) == []
    page.click("text=Replay")
    page.wait_for_selector(".figures >> text=the same text")
    with page.expect_request("**/chat/completions") as sent:
        page.fill("#prompt", "And of Spain?")
        page.press("#prompt", "Control+Enter")
    before = {"role": "assistant", "content": "".join(ANSWER[1:])}
    thought = {"reasoning": "".join(THOUGHT[2:-1])}
    assert sent.value.post_data_json["messages"][1] == {**before, **thought}


def test_what_is_cut_off_amid_a_thought_stays_open(open_page: Open, thinking: str) -> None:
    page = open_page(url=thinking)
    page.fill("#max_tokens", "5")
    page.press("#prompt", "Control+Enter")
    answered(page)
    assert page.locator(".answer details .token").all_text_contents() == THOUGHT[:5]
    assert page.locator(".answer details .token").first.is_visible()


def test_stop_and_replay(open_page: Open) -> None:
    page = open_page()
    ask(page, max_tokens="400", temperature="1")
    page.wait_for_selector(".answer .token")
    page.click("#stop-now")
    page.wait_for_selector(".figures >> text=stopped")
    assert page.locator("#stop-now").is_hidden() and page.locator("#send").is_enabled()
    ask(page, temperature="1")
    answered(page)
    (before,) = texts(page)
    page.click("text=Replay")
    page.wait_for_selector(".figures >> text=the same text")
    assert texts(page) == [before]


def copied(page: Any, what: str) -> str:
    page.evaluate("navigator.clipboard.writeText('')")
    page.click(f"#copy-{what}")
    until(page, "navigator.clipboard.readText().then(text => text !== '')")
    return str(page.evaluate("navigator.clipboard.readText()"))


def given(command: list[str], service: KeyedService, said: str = "") -> str:
    """What a program gives that knows the key by its usual variable."""
    environment = {**os.environ, "OUTRIDER_API_KEY": service.key}
    run = subprocess.run(command, input=said, env=environment, capture_output=True, text=True, check=True)
    return run.stdout


def test_what_is_copied_gives_the_same_text(open_page: Open, service: KeyedService) -> None:
    page = open_page()
    ask(page, temperature="1", stop="\\n\\n\\n", seed=str(2**64 - 1))
    answered(page)
    (text,) = texts(page)
    program = copied(page, "python")
    assert f"seed={2**64 - 1}" in program
    assert given([sys.executable, "-c", program], service) == text + "\n"
    line = copied(page, "curl")
    assert f'"seed": {2**64 - 1}' in line and service.key not in line
    if shutil.which("curl"):
        assert json.loads(given(["sh"], service, line))["choices"][0]["text"] == text


def test_a_form_that_was_changed_is_what_is_copied(open_page: Open) -> None:
    page = open_page()
    ask(page, max_tokens="8", prompt='it\'s "quoted" \\ $HOME `x`\n')
    answered(page)
    before = copied(page, "curl")
    assert '"max_tokens": 8' in before and '"seed"' in before
    page.fill("#max_tokens", "9")
    assert '"max_tokens": 9' in copied(page, "curl") and '"seed"' not in copied(page, "python")
    page.click("text=Replay")
    page.wait_for_selector(".figures >> text=the same text")
    assert copied(page, "curl") == before


def test_a_rate_is_told_only_of_what_took_a_while(open_page: Open) -> None:
    page = open_page()
    rates = page.evaluate(
        """async () => {
            const { Tokens } = await import("/page/tokens.js");
            const token = { bytes: [120], source: "plain", drafter: null, probability: null };
            const told = { drafted: 0, tokens: [token, token] };
            return [[], [1], [1, 1.0625], [null, null], [1, 1.25], [1, 2, 3]].map((times) => {
                const tokens = new Tokens(document.createElement("div"));
                tokens.add(times.map((seconds, step) => ({ step, seconds, ...told })));
                return tokens.rate(0.1);
            });
        }"""
    )
    assert rates == [None, None, None, None, 8, 2]


def test_side_by_side(open_page: Open) -> None:
    page = open_page("compare")
    ask(page)
    page.wait_for_selector("#verdict >> text=The same text, byte for byte.")
    drafted, plain = texts(page)
    assert drafted == plain
    columns = page.locator(".column")
    assert columns.nth(0).locator(".accepted").count() > 0
    assert columns.nth(1).locator(".token").count() == columns.nth(1).locator(".plain").count() > 0
    assert all(float(clock.removesuffix(" s")) > 0 for clock in page.locator(".clock").all_text_contents())
    keep(page, "page-side-by-side")
    ask(page, max_tokens="1")
    page.wait_for_selector("#verdict >> text=The same text, byte for byte. They were over too soon")


def test_the_live_service_and_a_drafter_that_is_killed(open_page: Open, service: KeyedService) -> None:
    page, other = open_page("live"), open_page("compare")
    until(page, "document.querySelectorAll('#board tbody tr').length > 3")
    drafters = page.locator("[aria-label=Drafters] tbody tr")
    until(page, "document.querySelectorAll('[aria-label=Drafters] tbody tr').length == 2")
    ask(other, max_tokens="600", temperature="1")
    until(
        page, "document.querySelector('[aria-label=\"Your sessions\"] tbody').textContent.includes('drafter')"
    )
    until(page, "parseInt(document.querySelector('svg[aria-label$=\" steps\"]')?.ariaLabel) > 3")
    own = page.locator("[aria-label='Your sessions'] tbody")
    assert "nobody: drafts are not asked for" in own.text_content()
    keep(page, "page-live", seconds=5)
    ids = drafters.locator("td:first-child").all_text_contents()
    service.serve.child("drafter").kill()
    until(page, "document.querySelector('.news').textContent.includes('left')")
    page.wait_for_selector("[aria-label=Drafters] tr.left")
    assert any(f"{id} left" in page.locator(".news").text_content() for id in ids)
    until(page, "document.querySelector('.news').textContent.includes('came')")  # started anew
    other.wait_for_selector("#verdict >> text=The same text")
    until(page, "document.querySelector('[aria-label=\"Your sessions\"] .none') !== null")
    assert page.locator("figure", has_text="k of your sessions").locator("li").count() == 2, (
        "of both, a while"
    )


def test_where_as_many_look_as_may_it_asks_seldom(open_page: Open) -> None:
    page, asked = open_page(), list[str]()

    def refuse(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=429, json={"error": {"message": "as many look as may"}})

    page.route("**/v1/live", refuse)
    page.clock.install()
    page.click("nav >> text=Live")
    for times in (1, 2):
        while len(asked) < times:
            page.wait_for_timeout(50)
        page.wait_for_selector(".state >> text=as many look as may Trying again.")
        page.clock.run_for(14_000)
        assert len(asked) == times
        page.clock.run_for(1_000)


def test_it_asks_for_a_key_and_takes_the_right_one(open_page: Open, service: KeyedService) -> None:
    page = open_page(keyed=False)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-value", "wrong")
    page.press("#key-value", "Enter")
    page.wait_for_selector("#key-why.wrong >> text=not known here")
    page.fill("#key-value", service.key)
    page.press("#key-value", "Enter")
    page.wait_for_selector("#model option", state="attached")
    assert page.locator("#key-dialog").is_hidden()
    ask(page)
    answered(page)
    assert page.evaluate("Object.values(localStorage).join()") == "", "a key outlives no tab"


def test_a_refusal_is_shown_in_the_service_s_own_words(open_page: Open) -> None:
    page = open_page(size=PHONE)
    ask(page, max_tokens="8")
    answered(page)
    before = texts(page), page.locator(".legend").text_content()
    page.fill("#seed", str(2**64))
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#trouble >> text=seed must be")
    until(page, "document.getElementById('trouble').getBoundingClientRect().top >= 0")
    assert (texts(page), page.locator(".legend").text_content()) == before, "what was answered stays"


@pytest.mark.parametrize("view", ["try", "compare", "live"])
def test_nothing_is_wider_than_a_phone(open_page: Open, view: str) -> None:
    page = open_page(view, PHONE)
    if view == "live":
        page.wait_for_selector("[aria-label=Verifiers] tbody tr")
    else:
        ask(page, max_tokens="32")
        page.wait_for_selector(".figures >> text=seed" if view == "try" else "#verdict >> text=same text")
    assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE[0]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page: Open, theme: str) -> None:
    page = open_page("try", theme=theme)
    ask(page, max_tokens="48", temperature="1")
    answered(page)
    found = [check(page, axe())]
    page.click("#key")
    found.append(check(page, axe()))
    page.click("#key-cancel")
    page.goto(page.url.partition("#")[0] + "#compare")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#verdict >> text=same text")
    found.append(check(page, axe()))
    page.goto(page.url.partition("#")[0] + "#live")
    page.wait_for_selector("[aria-label=Verifiers] tbody tr")
    found.append(check(page, axe()))
    assert found == [[], [], [], []]


def axe() -> Any:
    from axe_playwright_python.sync_playwright import Axe

    return Axe()


def check(page: Any, axe: Any) -> list[Any]:
    violations = axe.run(page).response["violations"]
    serious = [one for one in violations if one["impact"] in ("serious", "critical")]
    return [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in serious]
