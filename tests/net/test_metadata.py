"""Metadata that take one byte for an entry: a call has so many entries, and costs no more than others."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from grpc._cython import cygrpc

from outrider.net.metadata import MOST_BYTES, OVERHEAD
from outrider.net.rpc import add_methods, bind, channel, new_server
from outrider.wire.description import TokenizerFiles
from outrider.wire.hello import Role
from outrider.wire.methods import GET_TOKENIZER
from tests.net.http2 import CONTINUATION, FRAME_BYTES, HEAD_ENDS, HEADERS, call_head, connected, entry, frame

METHOD = GET_TOKENIZER[Role.DRAFTER]
AGAIN = b"\xbe"  # an entry: the newest that was said before


class Watched:
    """A server that counts what this process makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0  # bytes
        make = cygrpc._Metadatum._make

        def counted(key: str, value: str) -> Any:
            self.made += OVERHEAD + len(key) + len(value)
            return make(key, value)

        monkeypatch.setattr(cygrpc._Metadatum, "_make", counted)
        self._server = new_server()
        add_methods(self._server, {METHOD: self._tell})
        self.address = bind(self._server, "127.0.0.1", 0)

    async def __aenter__(self) -> Watched:
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(None)

    async def _tell(self, asked: None, context: Any) -> TokenizerFiles:
        await asyncio.sleep(0.01)  # while other calls come
        for _ in range(5):
            assert len(context.invocation_metadata()) > 200
        return TokenizerFiles("tokens", "x", "")


async def test_as_many_as_grpc_takes_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Watched(monkeypatch) as watched, channel(watched.address) as client:
        ask = client.unary_unary(METHOD.path)
        for _ in range(9):  # one after another, for one task
            await ask(b"", metadata=(("k", "v"),) * 200)
        await asyncio.gather(*(ask(b"", metadata=(("k", "v"),) * 200) for _ in range(9)))


@pytest.mark.parametrize("size", [1, 3000], ids=["small", "large"])
@pytest.mark.parametrize("frames", [1, 40])
async def test_of_entries_of_a_byte_no_more_are_made(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    frames: int,
    size: int,
) -> None:
    """Fifty frames, .8 MB, had held the event loop for more than a second, and 400 calls with a frame each a
    gigabyte of memory."""
    async with asyncio.timeout(60), Watched(monkeypatch) as watched:
        reader, writer = await connected(int(watched.address.rpartition(":")[2]))
        head = call_head(METHOD.path)
        writer.write(frame(HEADERS, 1, head + entry("big", "z" * size), HEAD_ENDS))
        for call in range(3, 9, 2):
            parts = [head + AGAIN * (FRAME_BYTES - len(head)), *[AGAIN * FRAME_BYTES] * (frames - 1)]
            for index, part in enumerate(parts):
                kind = CONTINUATION if index else HEADERS
                writer.write(frame(kind, call, part, HEAD_ENDS if index == frames - 1 else 0))
        refused = set[int]()
        while len(refused) < 3:
            said = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(said[:3]))
            if said[3] == HEADERS:
                refused.add(int.from_bytes(said[5:]))
        writer.close()
        assert watched.made <= 4 * MOST_BYTES
        told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert not told and "Traceback" not in capfd.readouterr().err, "as many lines as a peer likes"
