"""How a drafter joins: what it is told at the start, and what it makes of a router's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from drafter import joining as joining_module
from drafter.config import DrafterConfig
from drafter.joining import Joined, token_of
from outrider.errors import OutriderError, Overloaded, PeerRefused, StartupError, Unauthenticated
from outrider.net.rpc import add_methods, bind, new_server
from outrider.options.option import build
from outrider.options.worker import Joining
from outrider.wire.description import ModelInfo, WorkerInfo, WorkerRecord
from outrider.wire.drafter_sessions import DrafterCommand, DrafterEvents
from outrider.wire.hello import Identity, Role, read_hello
from outrider.wire.methods import JOIN

TOKEN = "dt-outrider-x"
MODEL = ModelInfo("small", "weights", "Arch", 1000, 100, 64, (0,), "cpu", "float32", True)
INFO = WorkerInfo(Identity(Role.DRAFTER, "laptop", 1, "weights", "tokens"), MODEL, 8, 16)
RECORD = WorkerRecord(INFO, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"token": None}, "--join needs a token"),
        ({"token_file": Path("token")}, "--token and --token-file both hold a token"),
        ({"token": "one two"}, "--token is none of `outrider keys add"),
        ({"join": "router.example.org:50051"}, "--join must be https://HOST:PORT"),
        ({"join": "https://router.example.org:x"}, "--join must be https://HOST:PORT"),
        ({"join": "https://router.example.org/v1"}, "--join must be https://HOST:PORT"),
        ({"join": "https://me:secret@router.example.org"}, "--join must be https://HOST:PORT"),
        ({"join": "https://a,"}, "--join must be https://HOST:PORT"),
        ({"join": "https://a,http://127.0.0.1:1"}, "--join has https and http"),
        ({"join": "http://192.0.2.1:50051"}, "--join leads to another machine without TLS"),
        ({"join": "http://127.0.0.1", "join_ca": Path("ca")}, "--join-ca is of no use with http://"),
        ({"router": "127.0.0.1:50051"}, "--router is for a drafter that others call"),
        ({"store": "redis://127.0.0.1"}, "--store is for a drafter that others call"),
        ({"advertise": "here"}, "--advertise is for a drafter that others call"),
        ({"join": None}, "--token is of no use without --join"),
    ],
)
def test_what_a_drafter_that_joins_cannot_be_told(given: dict[str, object], sentence: str) -> None:
    told = {"propose": "suffix", "join": "https://router.example.org", "token": TOKEN, **given}
    with pytest.raises(StartupError) as refused:
        build(DrafterConfig, told)
    assert refused.value.message.startswith(sentence)
    assert "secret" not in refused.value.message


def test_an_url_has_the_usual_port_and_may_be_several() -> None:
    joining = Joining("https://a, https://[2001:db8::1]:50051, https://a", TOKEN)
    assert [url.address for url in joining.urls] == ["a:443", "[2001:db8::1]:50051"]
    assert TOKEN not in repr(joining)
    assert build(
        DrafterConfig, {"propose": "suffix", "join": "http://192.0.2.1", "token": TOKEN, "insecure": True}
    )


def test_a_token_file_is_read_whenever_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "token"
    joining = Joining("https://a", token_file=file)
    with pytest.raises(StartupError, match=r"--token-file cannot be read: .*token: no such file"):
        token_of(joining)
    file.write_text("one two\n")
    with pytest.raises(StartupError, match="holds no token"):
        token_of(joining)
    file.write_text("dt-outrider-1\n")
    assert token_of(joining) == "dt-outrider-1"
    file.write_text("dt-outrider-2\n")
    assert token_of(joining) == "dt-outrider-2"


class Drafts:
    """A drafter's service that greets and then waits."""

    async def sessions(self, messages: Any, context: Any) -> AsyncIterator[DrafterEvents]:
        _, rest = await read_hello(messages, Role.ROUTER)
        yield DrafterEvents(hello=INFO.identity.hello())
        async for _ in rest:
            pass


Behaviour = Callable[[Any, Any], AsyncIterator[DrafterCommand]]
ROUTER = Identity(Role.ROUTER, "router", 1)


async def joined_to(
    *behaviours: Behaviour | None,
) -> tuple[asyncio.Task[None], asyncio.Queue[Any], list[Any]]:
    """Returns a drafter that joins routers of these behaviours, what it hears, and their servers."""
    servers, urls = [], []
    for behaviour in behaviours:
        server = new_server()
        if behaviour is not None:
            add_methods(server, {JOIN: behaviour})
        urls.append(f"http://{bind(server, '127.0.0.1', 0)}")
        await server.start()
        servers.append(server)
    states: asyncio.Queue[tuple[str | None, str]] = asyncio.Queue()
    membership = Joined(Joining(",".join(urls), TOKEN), Drafts(), None)
    keeping = asyncio.create_task(membership.keep(lambda: RECORD, lambda *state: states.put_nowait(state)))
    return keeping, states, servers


async def over(keeping: asyncio.Task[None], servers: list[Any]) -> None:
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    for server in servers:
        await server.stop(None)


async def test_it_says_what_it_is_and_joins_every_router_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining_module, "FIRST_BACKOFF_SECONDS", 0.01)
    shown: list[Any] = []

    async def router(messages: Any, context: Any) -> AsyncIterator[DrafterCommand]:
        shown.append((dict(context.invocation_metadata())["authorization"], (await anext(messages)).info))
        yield DrafterCommand(hello=ROUTER.hello())
        await anext(messages)
        if len(shown) > 4:
            await asyncio.Event().wait()

    keeping, states, servers = await joined_to(router, router)
    while len(shown) < 6:  # noqa: ASYNC110 (plain state)
        await asyncio.sleep(0.01)
    assert states.get_nowait()[1] == "joined"
    assert set(shown) == {(f"Bearer {TOKEN}", INFO)}
    await over(keeping, servers)


@pytest.mark.parametrize("error", [Unauthenticated("it is not known"), PeerRefused("it does not fit")])
async def test_a_refusal_for_good_ends_it_with_the_routers_sentence(error: OutriderError) -> None:
    async def router(messages: Any, context: Any) -> AsyncIterator[DrafterCommand]:
        raise error
        yield DrafterCommand()

    keeping, _, servers = await joined_to(router)
    with pytest.raises(PeerRefused, match=error.message):
        await keeping
    await over(keeping, servers)


@pytest.mark.parametrize("refuses_late", [False, True])
async def test_a_router_that_refuses_it_takes_it_from_no_other(
    refuses_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[int] = []
    here = asyncio.Event()

    async def refusing(messages: Any, context: Any) -> AsyncIterator[DrafterCommand]:
        if refuses_late:
            await asyncio.sleep(0.2)
        refused.append(1)
        raise Unauthenticated("it is not known")
        yield DrafterCommand()

    async def router(messages: Any, context: Any) -> AsyncIterator[DrafterCommand]:
        yield DrafterCommand(hello=ROUTER.hello())
        await here.wait()
        raise PeerRefused("it does not fit")

    keeping, states, servers = await joined_to(refusing, router)
    while (await states.get())[1] != "joined":
        pass
    while not (said := [line for line in caplog.messages if "it is not known" in line]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not keeping.done()
    here.set()
    with pytest.raises(PeerRefused, match="it does not fit"):
        await keeping
    assert refused == [1]
    assert len(said) == 1 and "going on with the other routers of --join" in said[0]
    await over(keeping, servers)


async def test_a_refusal_for_now_is_told_once_and_it_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_module, "FIRST_BACKOFF_SECONDS", 0.01)
    tries = []

    async def router(messages: Any, context: Any) -> AsyncIterator[DrafterCommand]:
        tries.append(1)
        if len(tries) < 3:
            raise Overloaded("not now")
        yield DrafterCommand(hello=ROUTER.hello())
        await asyncio.Event().wait()

    keeping, states, servers = await joined_to(router)
    taken_in_by, why = await states.get()
    assert taken_in_by is None and why.endswith("not now")
    assert (await states.get())[1] == "joined"
    await over(keeping, servers)


async def test_a_router_that_takes_none_that_join_is_named() -> None:
    keeping, states, servers = await joined_to(None)
    _, why = await states.get()
    assert "takes no drafters that join: start it with --drafter-tokens" in why
    await over(keeping, servers)
