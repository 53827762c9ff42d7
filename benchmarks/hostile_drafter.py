"""A hostile drafter of one kind as a process: it registers and is given sessions as any drafter is.

    python -m benchmarks.hostile_drafter "the wrong tail" 127.0.0.1:50051 TEXTS.json

It says of itself that it is fast and idle. TEXTS.json holds what the target says after each prompt that will
be asked: {"vocab": N, "texts": [[prompt, output], ...]} in token ids. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.hostile_kinds import KINDS, Kind, Text, drafts
from drafter.suffix import suffix_source
from outrider.net.commands import one_by_one
from outrider.net.conversation import Conversation, converse
from outrider.net.heartbeat import HEARTBEAT_SECONDS
from outrider.net.outbox import Outbox
from outrider.net.rpc import add_methods, bind, channel, new_server
from outrider.wire.description import WorkerRecord
from outrider.wire.drafter_sessions import CloseDraft, DrafterCommand, DrafterEvents, OpenDraft
from outrider.wire.hello import Identity, Role, read_hello
from outrider.wire.load import DrafterLoad
from outrider.wire.methods import DRAFTER_SESSIONS, SPECULATE
from outrider.wire.speculation import Attach, Commit, DraftBatch
from outrider.worker.described import add_description
from outrider.worker.registration import register, registrar_at

AGAIN_SECONDS = 0.5  # between two streams to a verifier
FIRST_STEP_SECONDS = 0.02  # guessed, until commits have shown it
SMOOTHING = 0.1
FLATTERING = DrafterLoad(token_seconds=1e-6)

Texts = dict[tuple[int, ...], list[int]]


@dataclass(slots=True)
class Session:
    claim: Attach
    text: Text
    steps: int = 0
    heard_at: float | None = None
    step_seconds: float = FIRST_STEP_SECONDS


class Link:
    """The stream to a verifier; made anew whenever it ends."""

    def __init__(self, address: str, identity: Identity, kind: Kind) -> None:
        self._address, self._identity, self._kind = address, identity, kind
        self._rng = random.Random(1)
        self.sessions: dict[bytes, Session] = {}
        self._outbox: Outbox[DraftBatch] = Outbox()
        self._task = asyncio.create_task(self._run())

    def add(self, session: Session) -> None:
        self.sessions[session.claim.session_id] = session
        self._outbox.put(DraftBatch(attach=[session.claim]))

    async def _run(self) -> None:
        while True:
            self._outbox = Outbox()
            for session in self.sessions.values():
                self._outbox.put(DraftBatch(attach=[session.claim]))
            with suppress(grpc.aio.AioRpcError):
                async with channel(self._address) as connection:
                    await self._speculate(converse(connection, SPECULATE))
            await asyncio.sleep(AGAIN_SECONDS)

    async def _speculate(self, stream: Conversation[Any, Any]) -> None:
        await stream.write(DraftBatch(hello=self._identity.hello()))
        writer = asyncio.create_task(self._write(stream))
        try:
            async for batch in stream.heard():
                for commit in batch.commits:
                    self._answer(commit)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, stream: Conversation[Any, Any]) -> None:
        async for batch in self._outbox:
            await stream.write(batch)

    def _answer(self, commit: Commit) -> None:
        session = self.sessions.get(commit.session_id)
        if session is None:
            return
        now = time.monotonic()
        if session.heard_at is not None:
            session.step_seconds += SMOOTHING * (now - session.heard_at - session.step_seconds)
        session.heard_at = now
        end = commit.base + len(commit.tokens)
        loop = asyncio.get_running_loop()
        for steps, draft in drafts(
            self._kind, session.text, commit.session_id, end, session.steps, self._rng
        ):
            batch = DraftBatch(drafts=[draft])
            if steps:
                loop.call_later(steps * session.step_seconds, self._outbox.put, batch)
            else:
                self._outbox.put(batch)
        session.steps += 1


class Hostile:
    """What the router sees of it."""

    def __init__(self, identity: Identity, kind: Kind, vocab: int, texts: Texts) -> None:
        self._identity, self._kind, self._vocab, self._texts = identity, kind, vocab, texts
        self._links: dict[str, Link] = {}

    async def sessions(
        self, messages: AsyncIterator[DrafterCommand], context: Any
    ) -> AsyncIterator[DrafterEvents]:
        _, commands = await read_hello(messages, Role.ROUTER)
        obeying = asyncio.create_task(self._obey(commands))
        try:
            yield DrafterEvents(hello=self._identity.hello())
            while not obeying.done():
                yield DrafterEvents(load=FLATTERING)
                await asyncio.sleep(HEARTBEAT_SECONDS)
            obeying.result()
        finally:
            obeying.cancel()

    async def _obey(self, commands: AsyncIterator[DrafterCommand]) -> None:
        async for command in one_by_one(commands):
            match command.command:
                case OpenDraft() as asked:
                    self._open(asked)
                case CloseDraft(session_id, _):
                    for link in self._links.values():
                        link.sessions.pop(session_id, None)

    def _open(self, asked: OpenDraft) -> None:
        prompt = asked.params.prompt
        tokens = [*prompt, *self._texts[prompt]]
        text = Text(lambda at: tokens[at] if at < len(tokens) else 0, self._vocab, len(prompt))
        link = self._links.get(asked.verifier_address)
        if link is None:
            link = self._links[asked.verifier_address] = Link(
                asked.verifier_address, self._identity, self._kind
            )
        link.add(Session(Attach(asked.session_id, asked.draft_key), text))


def known(file: str) -> tuple[int, Texts]:
    """Returns the size of the vocabulary, and the texts by their prompts."""
    told = json.loads(Path(file).read_text(encoding="utf-8"))
    return told["vocab"], {tuple(prompt): output for prompt, output in told["texts"]}


async def run(name: str, router: str, vocab: int, texts: Texts) -> None:
    source = suffix_source()  # as which it fits every target
    info = replace(
        source.info,
        identity=replace(source.info.identity, model_fingerprint=name),  # of which nothing is known yet
        model=replace(source.info.model, fingerprint=name),
    )
    hostile = Hostile(info.identity, KINDS[name], vocab, texts)
    server = new_server()
    add_methods(server, {DRAFTER_SESSIONS: hostile.sessions})
    add_description(server, info, source.tokenizer, lambda: True)
    address = bind(server, "127.0.0.1", 0)
    await server.start()

    def on_state(taken_in_by: str | None, reason: str) -> None:
        if taken_in_by is not None:
            print("ready", flush=True)

    record = WorkerRecord(info, address)
    registering = asyncio.create_task(register(registrar_at(router, None), lambda: record, on_state=on_state))
    await asyncio.to_thread(sys.stdin.read)
    registering.cancel()
    await asyncio.gather(registering, return_exceptions=True)
    await server.stop(0)


if __name__ == "__main__":
    name, router, file = sys.argv[1:]
    asyncio.run(run(name, router, *known(file)))
