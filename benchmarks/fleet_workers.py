"""Workers without models, hundreds to a process: they register, beat and report as real ones do.

    python -m benchmarks.fleet_workers verifier 300 0 redis://127.0.0.1:6379

Prints a line once all listen. A verifier commits four tokens for each of its sessions every 30 ms. Ends when
its standard input does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.keep import ROOT
from outrider.net.commands import one_by_one
from outrider.net.heartbeat import HEARTBEAT_SECONDS, IDLE_HEARTBEATS
from outrider.net.rpc import WORKER_PING_SECONDS, add_methods, bind, new_server
from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo, WorkerRecord
from outrider.wire.drafter_sessions import DrafterEvents
from outrider.wire.hello import Identity, Role
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.methods import DRAFTER_SESSIONS, GET_TOKENIZER, VERIFIER_SESSIONS
from outrider.wire.session import FinishReason
from outrider.wire.verifier_sessions import CloseSession, Committed, Finished, OpenSession, VerifierEvents
from outrider.worker.registration import register

STEP_SECONDS, STEP_TOKENS = 0.03, 4
TOKENIZER = ROOT / "demo" / "models" / "target" / "tokenizer.json"


class FakeWorker:
    """One worker with a server of its own."""

    def __init__(self, role: Role, number: int, tokenizer: TokenizerFiles, store: RedisStore) -> None:
        name = role.name.lower()
        identity = Identity(role, f"{name}-{number:05d}", number + 1, f"{name} model", tokenizer.hash)
        model = ModelInfo("fleet", f"{name} model", "Arch", 1, 8192, 8192, (0,), "cpu", "float32", True)
        self._info = WorkerInfo(identity, model, 65_536, 16)
        self._tokenizer = tokenizer
        self._store = store
        self._left: dict[bytes, list[int]] = {}  # session -> opening, length of its log, tokens to come

    async def start(self) -> None:
        server = new_server(ping_seconds=WORKER_PING_SECONDS)
        role = self._info.identity.role
        sessions = (
            {VERIFIER_SESSIONS: self._verify} if role is Role.VERIFIER else {DRAFTER_SESSIONS: self._draft}
        )
        add_methods(server, {GET_TOKENIZER[role]: self._get_tokenizer, **sessions})
        self._server, self._address = server, bind(server, "127.0.0.1", 0)
        await server.start()

    async def keep_registered(self) -> None:
        await register(self._store, lambda: WorkerRecord(self._info, self._address))

    async def _get_tokenizer(self, asked: None, context: Any) -> TokenizerFiles:
        return self._tokenizer

    async def _draft(self, commands: AsyncIterator[Any], context: Any) -> AsyncIterator[DrafterEvents]:
        yield DrafterEvents(hello=self._info.identity.hello())
        while True:
            yield DrafterEvents(load=DrafterLoad(token_seconds=0.004))
            await asyncio.sleep(HEARTBEAT_SECONDS * IDLE_HEARTBEATS)

    async def _verify(self, commands: AsyncIterator[Any], context: Any) -> AsyncIterator[VerifierEvents]:
        opened = asyncio.Event()

        async def obey() -> None:
            async for message in one_by_one(commands):
                match message.command:
                    case OpenSession() as asked:
                        log = len(asked.params.prompt) + len(asked.output)
                        self._left[asked.session_id] = [
                            asked.opening,
                            log,
                            asked.params.max_tokens - len(asked.output),
                        ]
                        opened.set()
                    case CloseSession(session_id, _):
                        self._left.pop(session_id, None)

        obeying = asyncio.create_task(obey())
        try:
            yield VerifierEvents(hello=self._info.identity.hello(), load=self._load())
            while True:
                opened.clear()
                if self._left:
                    await asyncio.sleep(STEP_SECONDS)
                    yield self._step()
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_SECONDS * IDLE_HEARTBEATS):
                        await opened.wait()
                if not self._left:
                    yield VerifierEvents(load=self._load())
        finally:
            obeying.cancel()

    def _load(self) -> VerifierLoad:
        running = len(self._left)
        return VerifierLoad(running=running, kv_usage=min(running / 100, 1.0), price=0.1)

    def _step(self) -> VerifierEvents:
        events = VerifierEvents()
        for session_id, (opening, base, left) in list(self._left.items()):
            tokens = [100 + (base + each) % 1000 for each in range(min(STEP_TOKENS, left))]
            events.committed.append(
                Committed(session_id, opening, base, tokens, len(tokens) - 1, len(tokens) - 1)
            )
            self._left[session_id] = [opening, base + len(tokens), left - len(tokens)]
            if left == len(tokens):
                del self._left[session_id]
                events.finished.append(Finished(session_id, opening, FinishReason.LENGTH))
        load = replace(
            self._load(), step_seconds=STEP_SECONDS, typical_step_seconds=STEP_SECONDS, step_tokens=5
        )
        return replace(events, load=load)


async def run(role: Role, count: int, first: int, url: str) -> None:
    store = RedisStore(parse_store_url(url))
    tokenizer = TokenizerFiles("tokenizer", TOKENIZER.read_text(), "", {})
    workers = [FakeWorker(role, first + number, tokenizer, store) for number in range(count)]
    for worker in workers:
        await worker.start()
    keeping = [asyncio.create_task(worker.keep_registered()) for worker in workers]
    print("listening", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in keeping:
        task.cancel()
    await asyncio.gather(*keeping, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(run(Role[sys.argv[1].upper()], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
