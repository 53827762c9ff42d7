"""Two routers, two verifiers and two drafters around one Redis, all real processes: one service."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from tokenizers import Tokenizer

from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.wire.description import WorkerRecord
from tests.e2e.conftest import DRAFT, ROOT, TARGET, Alone
from tests.e2e.test_serve import Case, cases, extra, fields
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

MAX_TOKENS = 40
LONG = 120  # tokens: still under way when a process is killed
READY_SECONDS = 240
Eventually = Callable[[Callable[[], bool], str], None]


@dataclass
class Role:
    """A process of one role."""

    command: tuple[str, ...]
    said: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider_cli", *self.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._read, args=(self.process, self.ready), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append(line)
            if " ready: " in line:
                ready.set()

    def wait(self) -> str:
        """The ready line."""
        assert self.ready.wait(READY_SECONDS), "".join(self.said)
        return next(line for line in reversed(self.said) if " ready: " in line)

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


@dataclass
class Service:
    redis: RedisServer
    routers: list[Role]
    verifiers: list[Role]
    drafters: list[Role]
    urls: list[str] = field(default_factory=list)

    @property
    def roles(self) -> list[Role]:
        return [*self.routers, *self.verifiers, *self.drafters]

    def workers(self, role: str) -> list[int]:
        """How many each router has."""
        counts = []
        for url in self.urls:
            text = httpx.get(f"{url}/metrics").text
            found = re.search(rf'outrider_workers{{role="{role}"}} (\d+)', text)
            counts.append(int(found[1]) if found else 0)
        return counts

    def running(self, verifier: str) -> float:
        """Sessions in its batch, as the routers heard last."""
        counts = []
        for url in self.urls:
            text = httpx.get(f"{url}/metrics").text
            counts += re.findall(rf'vllm:num_requests_running{{engine="{verifier}",.*}} (\S+)', text)
        return max(map(float, counts), default=0.0)

    def records(self) -> dict[str, WorkerRecord]:
        """What the store has, by address."""

        async def read() -> dict[str, WorkerRecord]:
            store = RedisStore(parse_store_url(self.redis.url))
            workers = store.workers()
            found = await anext(workers)
            await workers.aclose()  # type: ignore[attr-defined]
            await store.close()
            return {record.address: record for record in found.values()}

        return asyncio.run(read())


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with RedisServer() as redis:
        store = ("--store", redis.url)
        target = ("--target", str(TARGET), "--name", "outrider-demo")
        worker = ("--threads", "1", "--kv-memory", "128MiB", *store)
        made = Service(
            redis,
            [Role(("router", "--port", "0", "--grpc-port", "0", *store)) for _ in range(2)],
            [Role(("verifier", *target, "--port", free_port(), *worker)) for _ in range(2)],
            [Role(("drafter", "--draft", str(DRAFT), *worker)) for _ in range(2)],
        )
        try:
            for role in made.roles:
                role.start()
            for role in made.roles:
                role.wait()
            made.urls = [router.wait().split()[3] for router in made.routers]
            yield made
        finally:
            for role in made.roles:
                role.process.kill()
                role.process.wait()


@pytest.fixture
def complete(service: Service, eventually: Eventually) -> Service:
    """With all workers at both routers."""
    for role in ("verifier", "drafter"):
        eventually(lambda role=role: service.workers(role) == [2, 2], f"both routers have two {role}s")  # type: ignore[misc]
    return service


def ask(url: str, case: Case, max_tokens: int = MAX_TOKENS) -> dict[str, object]:
    body = {
        "prompt": list(case.prompt),
        "max_tokens": max_tokens,
        **fields(case.sampling),
        **extra(case.sampling),
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
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
    address = killed.wait().split()[3]
    before = complete.records()[address].info.identity
    wanted = cases(6)
    asked: list[dict[str, object]] = []
    asking = threading.Thread(target=lambda: asked.extend(asyncio.run(ask_all(complete, wanted, LONG))))
    asking.start()
    eventually(lambda: complete.running(before.worker_id) > 0, "sessions run there")
    killed.end(signal.SIGKILL)
    assert asking.is_alive(), "they were over before"
    eventually(lambda: complete.workers("verifier") == [1, 1], "both routers have dropped it")
    eventually(lambda: address not in complete.records(), "the store has forgotten it")
    asking.join()
    assert [text(answer) for answer in asked] == expected(alone, wanted, LONG)
    killed.start()
    killed.wait()
    eventually(lambda: complete.workers("verifier") == [2, 2], "both routers have it again")
    after = complete.records()[address].info.identity
    assert after.incarnation != before.incarnation


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
