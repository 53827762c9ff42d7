"""How many streams drafters have at a verifier, and how long one may be without a hello."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from outrider.errors import Overloaded
from outrider.wire.hello import Identity, Role
from outrider.wire.methods import SPECULATE
from outrider.wire.speculation import DraftBatch
from tests.verifier.talk import Running, Talk, drafter, greeting
from verifier.drafters import IDENTITY_SHARE, MAX_STREAMS


async def status(talk: Talk) -> grpc.aio.AioRpcError:
    """With which the stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while True:
            await talk.hear()
    return ended.value


async def test_streams_are_bounded_and_one_without_a_hello_ends(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.wire.hello.HELLO_SECONDS", 0.05)
    for method in (verifier.stub.Speculate, verifier.stub.Sessions):
        silent = Talk.start(method)
        assert "no hello" in ((await status(silent)).details() or "")
    monkeypatch.setattr("verifier.drafters.MAX_STREAMS", IDENTITY_SHARE)
    assert MAX_STREAMS > IDENTITY_SHARE
    first = await drafter(verifier)
    second = Talk.start(verifier.stub.Speculate)  # of the same address
    second.say(greeting(verifier, "another"))
    assert (await status(second)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.call.cancel()
    while verifier.service.drafters._streams_of[False]:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    await drafter(verifier)


async def test_one_identity_has_a_share_of_the_streams(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate's, from whichever address; without one the address's."""
    monkeypatch.setattr("verifier.drafters.MAX_STREAMS", 2 * IDENTITY_SHARE)
    drafters, streams = verifier.service.drafters, []

    async def hello() -> AsyncIterator[bytes]:
        yield SPECULATE.asked.to_bytes(DraftBatch(hello=Identity(Role.DRAFTER, "d", 1).hello()))
        await asyncio.Event().wait()

    async def joins(host: str, certificate: str = "") -> bool:
        stream = drafters.speculate(hello(), host, certificate)
        streams.append(stream)
        try:
            return (await anext(stream)).hello is not None
        except Overloaded:
            return False

    assert [await joins(host, "a") for host in ("h", "i", "j")] == [True, True, False]
    assert [await joins("h", certificate) for certificate in ("b", "", "", "")] == [True, True, True, False]
    assert [await joins(host) for host in ("k", "l", "m", "n")] == [True, True, True, False]  # all are taken
    for stream in streams:
        await stream.aclose()
    assert not drafters._streams_of[False]
