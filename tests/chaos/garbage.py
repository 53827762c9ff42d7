"""A drafter that lies: it registers as one more worker, goes by another drafter's name, and talks nonsense.

It is given sessions with their draft keys as any drafter is, so that what it says gets as far as the draft
trees; and it draws session ids and keys of its own, and cuts messages in the middle.

    python -m tests.chaos.garbage STORE_URL OWN_ADDRESS DRAFTER_ADDRESS...
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc.aio

from outrider.net.commands import one_by_one
from outrider.net.rpc import bind, channel, new_server
from outrider.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2
from outrider.wire.codec import worker_info_from_wire
from outrider.wire.description import WorkerInfo, WorkerRecord
from outrider.wire.hello import hello_to_wire
from outrider.worker.registration import register, registrar_at

PAUSE_SECONDS = 0.02  # between messages
FLOOD = 500_000  # ends that a message tells of, at two bytes each
RAW_SHARE = 0.05  # of messages, bytes that are no message
SPECULATE = "/outrider.v1.Verifier/Speculate"


class Rogue(drafter_pb2_grpc.DrafterServicer):
    def __init__(self, stolen: common_pb2.WorkerInfo, own: WorkerInfo, tokenizer: Any, seed: int) -> None:
        self._stolen = stolen
        self._own = own
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)

    async def GetInfo(self, request: Any, context: Any) -> common_pb2.WorkerInfo:
        return common_pb2.WorkerInfo(
            hello=hello_to_wire(self._own.identity.hello()), model=self._stolen.model
        )

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        return self._tokenizer

    async def Sessions(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        tasks = []
        try:
            async for command in one_by_one(request_iterator):
                match command.WhichOneof("command"):
                    case "hello":
                        yield drafter_pb2.DrafterEvents(hello=hello_to_wire(self._own.identity.hello()))
                    case "open":
                        tasks.append(asyncio.create_task(self._babble(command.open)))
                        ended = drafter_pb2.DraftEnded(session_id=self._rng.randbytes(16), reason="\0" * 99)
                        load = drafter_pb2.DrafterLoad(sessions=2**31, token_seconds=-1.0, busy=float("nan"))
                        yield drafter_pb2.DrafterEvents(ended=[ended], load=load)
                        yield drafter_pb2.DrafterEvents(ended=[drafter_pb2.DraftEnded()] * FLOOD)
        finally:
            for task in tasks:
                task.cancel()

    async def _babble(self, session: drafter_pb2.OpenDraft) -> None:
        """Over and over: it is cut off, and comes back."""
        while True:
            ends = [len(session.params.prompt) + len(session.output)]  # of the log, as told
            with suppress(grpc.aio.AioRpcError):
                async with channel(session.verifier_address) as connection:
                    call = connection.stream_stream(
                        SPECULATE, response_deserializer=verifier_pb2.CommitBatch.FromString
                    )(self._nonsense(session, ends))
                    async for batch in call:
                        ends += [commit.base + len(commit.tokens) for commit in batch.commits]
            await asyncio.sleep(1.0)

    async def _nonsense(self, session: drafter_pb2.OpenDraft, ends: list[int]) -> AsyncIterator[bytes]:
        rng = self._rng
        yield verifier_pb2.DraftBatch(hello=self._stolen.hello).SerializeToString()
        own = verifier_pb2.Attach(session_id=session.session_id, draft_key=session.draft_key)
        yield verifier_pb2.DraftBatch(attach=[own]).SerializeToString()
        while True:
            batch = self._batch(session, ends[-1]).SerializeToString()
            yield batch if rng.random() > RAW_SHARE else batch[: rng.randrange(len(batch))]
            await asyncio.sleep(PAUSE_SECONDS)

    def _batch(self, session: drafter_pb2.OpenDraft, end: int) -> verifier_pb2.DraftBatch:
        rng = self._rng
        count = rng.choice([0, 1, 5, 12, 400])
        wild = rng.random() < 0.5
        foreign = rng.random() < 0.2
        draft = verifier_pb2.Draft(
            session_id=rng.randbytes(rng.randrange(20)) if foreign else session.session_id,
            base=rng.choice([end + rng.randrange(40), 0, 2**32 - 1]) if wild else end,
            tokens=[rng.randrange(2**32 if wild else self._stolen.model.vocab_size) for _ in range(count)],
            parents=[rng.randrange(-3, count + 1) for _ in range(count)] if rng.random() < 0.3 else [],
            survival=rng.randbytes(rng.choice([0, count, 3])),
        )
        attach = [verifier_pb2.Attach(session_id=rng.randbytes(16), draft_key=rng.randbytes(16))]
        return verifier_pb2.DraftBatch(
            drafts=[draft] * rng.choice([1, 1, 30]),
            attach=attach if foreign else [],
            stamp_us=rng.getrandbits(64),
        )


async def steal(addresses: list[str]) -> tuple[common_pb2.WorkerInfo, common_pb2.Tokenizer]:
    """What the first drafter that answers says of itself."""
    while True:
        for address in addresses:
            with suppress(grpc.aio.AioRpcError):
                async with channel(address) as connection:
                    stub = drafter_pb2_grpc.DrafterStub(connection)
                    info = await stub.GetInfo(common_pb2.GetInfoRequest(), timeout=2)
                    return info, await stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=5)


async def main(store: str, own_address: str, *drafters: str) -> None:
    stolen, tokenizer = await steal(list(drafters))
    rng = random.Random()
    known = worker_info_from_wire(stolen)
    identity = replace(
        known.identity, worker_id=f"rogue-{rng.getrandbits(32):x}", incarnation=rng.getrandbits(64)
    )
    own = replace(known, identity=identity)
    host, _, port = own_address.rpartition(":")
    server = new_server()
    drafter_pb2_grpc.add_DrafterServicer_to_server(Rogue(stolen, own, tokenizer, rng.getrandbits(32)), server)
    bind(server, host, int(port))
    await server.start()
    record = WorkerRecord(own, own_address)
    await register(
        registrar_at(None, store),
        lambda: record,
        on_state=lambda by, _: print("rogue drafter ready", flush=True) if by else None,
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
