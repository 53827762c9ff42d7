"""Several routers with one Redis, all real processes: one service."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from functools import partial

import httpx
import pytest
from tokenizers import Tokenizer

from tests.asking_on import asking_on, under_way
from tests.e2e.conftest import TARGET, Alone, Eventually
from tests.e2e.test_serve import Case, cases, extra, fields
from tests.e2e.two_routers import Service

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

MAX_TOKENS = 40
LONG = 120  # tokens


def ask(url: str, case: Case, max_tokens: int = MAX_TOKENS) -> dict[str, object]:
    body = {
        "prompt": list(case.prompt),
        "max_tokens": max_tokens,
        **fields(case.sampling),
        **extra(case.sampling),
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    told: dict[str, object] = answer.json()
    return told


def text(answer: dict[str, object]) -> str:
    return str(answer["choices"][0]["text"])  # type: ignore[index]


async def ask_all(
    service: Service, wanted: list[Case], max_tokens: int = MAX_TOKENS
) -> list[dict[str, object]]:
    """Asks one router and the other in turn, all at once."""
    return await asyncio.gather(
        *(asyncio.to_thread(ask, service.urls[n % 2], case, max_tokens) for n, case in enumerate(wanted))
    )


def expected(alone: Alone, wanted: list[Case], max_tokens: int = MAX_TOKENS) -> list[str]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [tokenizer.decode(alone.tokens(case.prompt, case.sampling, max_tokens)) for case in wanted]


def test_both_routers_give_the_targets_own_text_with_all_workers_at_work(
    complete: Service, alone: Alone
) -> None:
    wanted = [case for case in cases(8) for _ in range(2)]  # each at one router and at the other
    answers = asyncio.run(ask_all(complete, wanted))
    assert [text(answer) for answer in answers] == expected(alone, wanted)
    accepted = [
        answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]  # type: ignore[index]
        for answer in answers
    ]
    assert sum(accepted[0::2]) > 0 and sum(accepted[1::2]) > 0


def test_a_killed_verifier_is_gone_from_both_and_comes_back_as_another_incarnation(
    complete: Service, alone: Alone, eventually: Eventually
) -> None:
    killed = complete.verifiers[0]
    address = killed.address
    before = complete.records()[address].info.identity
    wanted = cases(6)
    asks = [partial(ask, complete.urls[n % 2], case, LONG) for n, case in enumerate(wanted)]
    with asking_on(asks) as answers:
        eventually(lambda: complete.running(before.worker_id) > 0, "sessions run there")
        at = time.monotonic()
        killed.end(signal.SIGKILL)
        eventually(lambda: complete.workers("verifier") == [1, 1], "both routers have dropped it")
        eventually(lambda: address not in complete.records(), "the store has forgotten it")
    assert under_way(answers, at)
    for each, said in zip(answers, expected(alone, wanted, LONG), strict=True):
        assert each and {text(one.answer) for one in each} == {said}
    killed.start()
    killed.wait()
    eventually(lambda: complete.workers("verifier") == [2, 2], "both routers have it again")
    after = complete.records()[address].info.identity
    assert after.incarnation != before.incarnation


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_a_worker_that_stands_still_costs_a_pause_and_comes_back(
    complete: Service, alone: Alone, eventually: Eventually, role: str
) -> None:
    """SIGSTOP: what it had goes on elsewhere, and after SIGCONT it is taken in again."""
    stopped = (complete.verifiers if role == "verifier" else complete.drafters)[0]
    worker_id = complete.records()[stopped.address].info.identity.worker_id
    wanted = cases(8)
    before = complete.generated()

    def under_way() -> bool:
        return complete.running(worker_id) > 0 if role == "verifier" else complete.generated() > before

    asked: list[dict[str, object]] = []
    asking = threading.Thread(target=lambda: asked.extend(asyncio.run(ask_all(complete, wanted, LONG))))
    asking.start()
    eventually(under_way, "sessions run")
    stopped.process.send_signal(signal.SIGSTOP)
    try:
        asking.join()
        assert [text(answer) for answer in asked] == expected(alone, wanted, LONG)
        eventually(lambda: complete.workers(role) == [1, 1], f"both routers have dropped the {role}")
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    eventually(lambda: complete.workers(role) == [2, 2], f"both routers have the {role} again")
    answers = asyncio.run(ask_all(complete, wanted))
    assert [text(answer) for answer in answers] == expected(alone, wanted)


def test_the_service_goes_on_while_the_redis_is_away(
    complete: Service, alone: Alone, eventually: Eventually
) -> None:
    wanted = cases(4)
    complete.redis.kill()
    try:
        answers = asyncio.run(ask_all(complete, wanted))
        assert [text(answer) for answer in answers] == expected(alone, wanted)
    finally:
        complete.redis.start()
    eventually(lambda: len(complete.records()) == 4, "all workers have registered again")
    assert complete.workers("verifier") == complete.workers("drafter") == [2, 2]
    leaving = complete.drafters[1]
    leaving.end(signal.SIGTERM)
    eventually(lambda: complete.workers("drafter") == [1, 1], "the routers follow the store again")
    assert leaving.process.returncode == 0
