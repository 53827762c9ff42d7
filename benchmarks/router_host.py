"""What a router costs: processor time of its process a token, with many streams and no models.

    python -m benchmarks.router_host --write benchmarks/results/router-host.json

A real router serves a scripted verifier, which commits tokens for every session at a fixed pace, and
streaming clients in a process of their own. The processor time is what the system counts for the router's
process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import grpc.aio
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import ROOT, Write, keep
from outrider.engine.tokenizer import load_tokenizer
from outrider.net.commands import one_by_one
from outrider.net.outbox import Outbox
from outrider.net.rpc import add_methods, bind, channel, new_server
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo, WorkerRecord
from outrider.wire.hello import Identity, Role
from outrider.wire.load import VerifierLoad
from outrider.wire.methods import GET_TOKENIZER, VERIFIER_SESSIONS
from outrider.wire.verifier_sessions import (
    CloseSession,
    Committed,
    OpenSession,
    VerifierCommand,
    VerifierEvents,
)
from outrider.worker.registration import RouterRegistrar, register

MODEL = ROOT / "demo" / "models" / "target"
CONTEXT = 1_000_000
PROGRAM = ("-c", "from outrider_cli import main; main()")
APIS = ("http", "grpc")
MEASURE = """import asyncio, json, sys
from benchmarks.router_host import measure
print(json.dumps(asyncio.run(measure(*json.loads(sys.argv[1])))))"""
TICKS = os.sysconf("SC_CLK_TCK")


class ScriptedVerifier:
    """Commits `tokens` for every open session at each step; of them all but the last were drafted."""

    def __init__(self, info: WorkerInfo, tokenizer: TokenizerFiles, tokens: int, drafts: int) -> None:
        self._info, self._tokenizer, self._tokens, self._drafts = info, tokenizer, tokens, drafts
        self._lengths: dict[bytes, int] = {}
        self._openings: dict[bytes, int] = {}
        self._outbox: Outbox[VerifierEvents] = Outbox(10_000)
        self._next = 100
        self.committed = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        add_methods(
            server, {GET_TOKENIZER[Role.VERIFIER]: self.get_tokenizer, VERIFIER_SESSIONS: self.sessions}
        )

    async def get_tokenizer(self, asked: None, context: Any) -> TokenizerFiles:
        return self._tokenizer

    async def sessions(
        self, messages: AsyncIterator[VerifierCommand], context: Any
    ) -> AsyncIterator[VerifierEvents]:
        async def read() -> None:
            async for message in one_by_one(messages):
                match message.command:
                    case OpenSession() as asked:
                        self._lengths[asked.session_id] = len(asked.params.prompt)
                        self._openings[asked.session_id] = asked.opening
                    case CloseSession(session_id, _):
                        self._lengths.pop(session_id, None)

        reading = asyncio.create_task(read())
        yield VerifierEvents(hello=self._info.identity.hello())
        try:
            async for events in self._outbox:
                yield events
        finally:
            reading.cancel()

    def step(self, seconds: float) -> None:
        load = VerifierLoad(
            running=len(self._lengths),
            step_seconds=seconds,
            typical_step_seconds=seconds,
            step_tokens=len(self._lengths) * (1 + self._drafts),
            price=0.05,
        )
        events = VerifierEvents(load=load)
        for session_id, base in self._lengths.items():
            tokens = [100 + (base + each) % 1000 for each in range(self._tokens)]
            step = Committed(
                session_id, self._openings[session_id], base, tokens, self._tokens - 1, self._drafts
            )
            events.committed.append(step)
            self._lengths[session_id] = base + self._tokens
            self.committed += self._tokens
        self._outbox.put(events)


async def _stream(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {
            "prompt": [5, 6, 7],
            "max_tokens": CONTEXT // 2,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
    )
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    while await reader.read(65536):
        pass


async def _grpc_stream(address: str) -> None:
    async with channel(address) as connection:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[5, 6, 7]),
            max_tokens=CONTEXT // 2,
            temperature=0,
            ignore_eos=True,
        )
        call: Any = generation_pb2_grpc.GenerationStub(connection).Generate(request)
        while await call.read():
            pass


async def _clients(address: str, streams: int) -> None:
    if address.isdecimal():
        await asyncio.gather(*(_stream(int(address)) for _ in range(streams)))
    else:
        await asyncio.gather(*(_grpc_stream(address) for _ in range(streams)))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(
    streams: int, tokens: int, drafts: int, step: float, seconds: float, grpc: bool
) -> dict[str, float]:
    """Returns microseconds of the router's processor time a token, and tokens a second."""
    tokenizer = load_tokenizer(MODEL)
    identity = Identity(Role.VERIFIER, "scripted", 1, "scripted model", tokenizer.hash)
    model = ModelInfo("scripted", "scripted model", "Arch", 1, 8192, CONTEXT, (0,), "cpu", "float32", True)
    info = WorkerInfo(identity, model, 10**6, 16)
    verifier = ScriptedVerifier(info, tokenizer, tokens, drafts)
    server = new_server()
    verifier.add_to(server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, *PROGRAM, "router", "--port", "0", "--grpc-port", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert router.stdout is not None
    clients = registering = None
    try:
        line = (await router.stdout.readline()).decode()
        http, grpc_address = re.search(r"http://[^ ]*:(\d+) \(gRPC ([^ )]+)", line).groups()  # type: ignore[union-attr]
        registrar = RouterRegistrar(grpc_address)
        known = asyncio.Event()
        registering = asyncio.create_task(
            register(registrar, lambda: WorkerRecord(info, address), on_state=lambda *_: known.set())
        )
        await known.wait()
        clients = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "clients", grpc_address if grpc else http, str(streams)
        )
        began = None
        while True:
            await asyncio.sleep(step)
            verifier.step(step)
            now = time.monotonic()
            if began is None and len(verifier._lengths) == streams:
                began = now + 2.0
                first = None
            if began is not None and now >= began:
                if first is None:
                    first = (now, _cpu_seconds(router.pid), verifier.committed)
                elif now >= began + seconds:
                    cpu, committed = _cpu_seconds(router.pid) - first[1], verifier.committed - first[2]
                    return {
                        "microseconds_a_token": cpu / committed * 1e6,
                        "tokens_a_second": committed / (now - first[0]),
                        "busy": cpu / (now - first[0]),
                    }
    finally:
        for process in (clients, router):
            if process is not None:
                process.terminate()
                await process.wait()
        if registering is not None:
            registering.cancel()
        await server.stop(0)


def main(
    streams: Annotated[int, typer.Option(help="Clients at once.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens that a step commits for each.")] = 1,
    drafts: Annotated[int, typer.Option(help="Draft tokens that a step verifies for each.")] = 0,
    step: Annotated[float, typer.Option(help="Seconds between steps.")] = 0.005,
    seconds: Annotated[float, typer.Option(help="Seconds of measuring.")] = 5.0,
    repetitions: Annotated[int, typer.Option(help="How often HTTP and gRPC are measured, in turn.")] = 5,
    beside: Annotated[Path | None, typer.Option(help="Another checkout, measured in turn with this.")] = None,
    write: Write = None,
) -> None:
    """Measure what a router takes for a token."""
    folders = {"this": ROOT} if beside is None else {"this": ROOT, "other": beside.resolve()}
    found: dict[str, list[dict[str, float]]] = {f"{api} {name}": [] for api in APIS for name in folders}
    for _ in range(repetitions):
        for api in APIS:
            for name, folder in folders.items():
                run = _measured(folder, [streams, tokens, drafts, step, seconds, api == "grpc"])
                found[f"{api} {name}"].append(run)
                typer.echo(f"{api} {name}: {run['microseconds_a_token']:.1f} us a token")
    medians = {key: median(run["microseconds_a_token"] for run in runs) for key, runs in found.items()}
    told: dict[str, object] = {"microseconds_a_token": medians}
    if beside is not None:
        told["this_over_other"] = {api: medians[f"{api} this"] / medians[f"{api} other"] for api in APIS}
    typer.echo(f"median: {told}")
    keep(write, {**told, "runs": found})


def _measured(folder: Path, asked: list[object]) -> dict[str, float]:
    """Returns what `measure` of a checkout finds."""
    program = [sys.executable, "-c", MEASURE, json.dumps(asked)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    said = subprocess.run(program, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["clients"]:
        asyncio.run(_clients(sys.argv[2], int(sys.argv[3])))
    else:
        typer.run(main)
