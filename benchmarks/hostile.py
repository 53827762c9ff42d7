"""What nineteen kinds of hostile drafter cost, with real processes.

    python -m benchmarks.hostile --write benchmarks/results/hostile-epyc.json

A router and a verifier, to which one drafter after the other comes, each a process, of whom nothing is known
before. When one has drafted for five seconds, the same requests are asked in turn as they are and with
`num_speculative_tokens` 0, which is plain decoding beside the same processes; a ratio is that of two groups
that ran one after the other. The verifier computes on the first half of the cores, all else on the others.
Every answer is held against plain decoding's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.hostile_kinds import KINDS
from benchmarks.keep import ROOT, Target, Write, keep
from demo.heldout import heldout_prompts
from outrider.errors import StartupError
from outrider.net.conversation import converse
from outrider.net.outbox import Outbox
from outrider.net.rpc import channel
from outrider.options.engine import EngineOptions
from outrider.options.sessions import SessionOptions
from outrider.sampling.params import SamplingParams
from outrider.wire.hello import Identity, Role
from outrider.wire.methods import VERIFIER_SESSIONS
from outrider.wire.session import SessionParams, new_session_id
from outrider.wire.verifier_sessions import OpenSession, VerifierCommand
from outrider_cli.bench.client import Request, ServerClient
from outrider_cli.bench.figures import Measured, Spread, measured
from outrider_cli.bench.group import Server, ask_together
from outrider_cli.bench.http import Http
from outrider_cli.bench.placing import Cores, stay_on
from outrider_cli.bench.services import EXTRAS, Service, service
from outrider_cli.children import Models, Workers

CONSOLE = Console()
GOAL = 0.97  # of plain decoding
WARM_SECONDS = 5.0
PROMPTS = 8
BEYOND = 64  # tokens of the text that a drafter knows after the end of an answer
KV_MEMORY = "256MiB"
NAME = "model"

Json = dict[str, object]
Pair = tuple[Measured, Measured]  # with the drafter, and plain


async def tokenized(service: Service, prompts: Sequence[str]) -> list[list[int]]:
    """Returns the prompts as their router reads them."""
    http, found = Http(service.url), []
    for prompt in prompts:
        body = json.dumps({"model": NAME, "prompt": prompt}).encode()
        async with http.asked("POST", "/tokenize", body) as response:
            found.append(json.loads(await response.read())["tokens"])
    await http.close()
    return found


async def said_by(verifier: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Returns what the verifier at host:port says after each prompt, so many tokens."""
    commands: Outbox[VerifierCommand] = Outbox()
    commands.put(VerifierCommand(hello=Identity(Role.ROUTER, "who asks for the texts", 1).hello()))
    outputs: dict[bytes, list[int]] = {}
    for number, prompt in enumerate(prompts, 1):
        session_id = new_session_id()
        outputs[session_id] = []
        params = SessionParams(tuple(prompt), SamplingParams(temperature=0.0), tokens)
        commands.put(VerifierCommand(command=OpenSession(session_id, params, (), 0, b"", number)))
    ended = 0
    async with channel(verifier) as connection:
        call = converse(connection, VERIFIER_SESSIONS, aiter(commands))
        async for events in call.heard():
            for step in events.committed:
                outputs[step.session_id] += step.tokens
            ended += len(events.finished) + len(events.failed)
            if ended == len(prompts):
                break
        call.cancel()
    assert all(len(output) == tokens for output in outputs.values()), "the verifier gave no whole text"
    return list(outputs.values())


@asynccontextmanager
async def hostile(kind: str, router: str, texts: Path, cores: Cores) -> AsyncIterator[None]:
    """Runs such a drafter as a process. Raises StartupError if it ends too early."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(*cores.prefix(cores.draft), sys.executable, "-m", "benchmarks.hostile_drafter"),
        *(kind, router, str(texts)),
        cwd=ROOT,
        stdin=pipe,
        stdout=pipe,
    )
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise StartupError(f"the hostile drafter ({kind}) ended before it was ready")
        yield
        if process.returncode is not None:
            raise StartupError(f"the hostile drafter ({kind}) ended by itself")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Asking:
    """What is asked of one service."""

    def __init__(self, running: Service, prompts: Sequence[str], streams: int, max_tokens: int) -> None:
        self._service = running
        self._plain = ServerClient(running.url, NAME, {**EXTRAS, "num_speculative_tokens": 0})
        self._prompts, self._streams, self._max_tokens = prompts, streams, max_tokens
        self.texts: dict[tuple[bool, str], set[str]] = {}  # answers, by whether they are plain, and prompt

    async def close(self) -> None:
        await self._plain.close()

    async def warm(self, seconds: float) -> Measured:
        """Asks with the drafter for so long, once at least. Returns the first group: the service may leave
        the drafter after it."""
        until, group = time.monotonic() + seconds, 1
        first = await self._group(self._service, 0, plain=False)
        while time.monotonic() < until:
            await self._group(self._service, group, plain=False)
            group += 1
        return first

    async def pair(self, number: int) -> Pair:
        """Asks one group both ways; the order changes from pair to pair."""
        found: dict[bool, Measured] = {}
        for plain in (False, True) if number % 2 else (True, False):
            found[plain] = await self._group(self._plain if plain else self._service, number, plain)
        return found[False], found[True]

    async def _group(self, server: Server, number: int, plain: bool) -> Measured:
        first = number * self._streams
        requests = [
            Request(self._prompts[(first + each) % len(self._prompts)], self._max_tokens, 0.0, 0)
            for each in range(self._streams)
        ]
        answers = await ask_together(server, requests, self._service.cpu)
        for request, reply in zip(requests, answers.replies, strict=True):
            assert isinstance(request.prompt, str)
            self.texts.setdefault((plain, request.prompt), set()).add(reply.text)
        return measured(answers)

    @property
    def different(self) -> int:
        """Returns of how many prompts the answers are not all the same."""
        prompts = {prompt for _, prompt in self.texts}
        ways = (
            self.texts.get((False, each), set()) | self.texts.get((True, each), set()) for each in prompts
        )
        return sum(len(texts) > 1 for texts in ways)


def told(first: Measured, pairs: Sequence[Pair], tokens: int, different: int) -> Json:
    """Returns the figures of one kind, whose `first` group came before; `tokens`: that each group was asked
    for."""
    ratios = [drafted.rate / plain.rate for drafted, plain in pairs]
    processor = [
        drafted.tokens_per_target_second / plain.tokens_per_target_second
        for drafted, plain in pairs
        if drafted.tokens_per_target_second and plain.tokens_per_target_second
    ]
    verified = sum(drafted.drafted for drafted, _ in pairs)
    accepted = sum(drafted.accepted for drafted, _ in pairs)
    asked = tokens * len(pairs)
    return {
        "of_plain": _spread(ratios),
        "of_plain_in_all": _time(plain for _, plain in pairs) / _time(drafted for drafted, _ in pairs),
        "of_plain_a_target_processor_second": _spread(processor),
        "rows_in_vain_a_token": (verified - accepted) / asked,
        "accepted_a_token": accepted / asked,
        "at_first": {
            "rows_in_vain_a_token": (first.drafted - first.accepted) / tokens,
            "accepted_a_token": first.accepted / tokens,
        },
        "plain_tokens_a_second": Spread.of([plain.rate for _, plain in pairs]).median,
        "prompts_with_different_answers": different,
        "ratios": ratios,
    }


def _time(groups: Iterable[Measured]) -> float:
    """Returns the seconds a token of several groups."""
    return sum(1 / one.rate for one in groups)


def _spread(values: Sequence[float]) -> Json:
    found = Spread.of(values)
    return {
        "median": found.median,
        "lower_quartile": found.lower_quartile,
        "upper_quartile": found.upper_quartile,
    }


async def measure(
    target: str, kinds: Sequence[str], streams: int, max_tokens: int, pairs: int, warm_seconds: float
) -> dict[str, Json]:
    cores = Cores.divided(sorted(os.sched_getaffinity(0)))
    stay_on(cores.draft)
    prompts = heldout_prompts(PROMPTS)
    workers = Workers(verifiers=1, drafters=0, engine=EngineOptions(kv_memory=KV_MEMORY))
    found: dict[str, Json] = {}
    models = Models(target, None, NAME)
    with tempfile.TemporaryDirectory() as folder:
        async with service(models, cores, SessionOptions(), workers) as running:
            ids = await tokenized(running, prompts)
            outputs = await said_by(running.addresses["target"], ids, max_tokens + BEYOND)
            vocab = json.loads((Path(target) / "config.json").read_text())["vocab_size"]
            texts = Path(folder) / "texts.json"
            texts.write_text(json.dumps({"vocab": vocab, "texts": [*zip(ids, outputs, strict=True)]}))
            for kind in kinds:
                asking = Asking(running, prompts, streams, max_tokens)
                async with hostile(kind, running.addresses["router"], texts, cores):
                    first = await asking.warm(warm_seconds)
                    made = [await asking.pair(number) for number in range(pairs)]
                await asking.close()
                found[kind] = told(first, made, streams * max_tokens, asking.different)
                CONSOLE.print(f"{kind}: {', '.join(_row(found[kind]))}")
    return found


def _shown(spread: object) -> str:
    assert isinstance(spread, Mapping)
    return f"{spread['median']:.3f} ({spread['lower_quartile']:.3f} to {spread['upper_quartile']:.3f})"


def _row(one: Mapping[str, object]) -> list[str]:
    return [
        _shown(one["of_plain"]),
        f"{one['of_plain_in_all']:.3f}",
        _shown(one["of_plain_a_target_processor_second"]),
        f"{one['rows_in_vain_a_token']:.3f}",
        f"{one['accepted_a_token']:.3f}",
        "DIFFERENT" if one["prompts_with_different_answers"] else "the same",
    ]


def main(
    target: Target = "demo/models/target",
    kind: Annotated[
        list[str] | None, typer.Option(help="Kinds of drafter, by their names; all by default.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 512,
    pairs: Annotated[int, typer.Option(min=1, help="How often both ways are measured.")] = 12,
    warm_seconds: Annotated[float, typer.Option(min=0, help="With the drafter, before.")] = WARM_SECONDS,
    write: Write = None,
) -> None:
    """Measure what is left of plain decoding beside each kind of hostile drafter."""
    found = asyncio.run(measure(target, kind or list(KINDS), streams, max_tokens, pairs, warm_seconds))
    table = Table(
        "drafter", "of plain", "in all", "a target's second", "in vain a token", "accepted", "texts"
    )
    for name, one in found.items():
        table.add_row(name, *_row(one))
    CONSOLE.print(table)
    keep(
        write,
        {
            "streams": streams,
            "max_tokens": max_tokens,
            "pairs": pairs,
            "goal": GOAL,
            "load_average": os.getloadavg(),
            "kinds": found,
        },
    )


if __name__ == "__main__":
    typer.run(main)
