"""Where tokens came from as clients are told it, of scripted steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from outrider.net.rpc import bind, channel, new_server
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.guesses import Guess
from outrider.wire.session import FinishReason
from router.api.grpc_generation import add_generation_service
from router.api.intake import Intake
from router.detokenize import piece
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEnded, SessionEvent, TokensCommitted
from tests.router.api.scripted import EOS, ScriptedRunner, byte_level, served

TOKENIZER = byte_level()
MODEL = served(TOKENIZER)
IDS = tuple(TOKENIZER.encode("the fox 😀", add_special_tokens=False).ids)
END = TOKENIZER.token_to_id(EOS)
ClientOf = Callable[..., httpx.AsyncClient]


def guess(token: int, chance: float = 0.5, drafter: str = "d") -> Guess:
    return Guess(token, chance, drafter)


def guessed(request: GenerationRequest) -> list[SessionEvent]:
    """A plain step; a tree with a bonus; a step with a correction; one whose last guess ends the text."""
    first, one, two, three, *rest = IDS
    script = [
        TokensCommitted((first,), 0, 0, seconds=0.5),
        TokensCommitted((one, two), 1, 1, guesses=(guess(one, 0.25, "other"),), beside=2, seconds=0.75),
        TokensCommitted((three,), 0, 2, guesses=(guess(one), guess(two)), seconds=1.0),
        TokensCommitted((*rest, END), len(rest) + 1, len(rest) + 1, guesses=(*map(guess, rest), guess(END))),
    ]
    unasked = [each._replace(guesses=(), seconds=None) for each in script]
    return [*(script if request.params.guesses else unasked), SessionEnded(FinishReason.STOP)]


def token(token: int, guess: Guess | None = None, **more: Any) -> dict[str, Any]:
    text = b"" if token == END else piece(TOKENIZER, token)
    try:
        shown = text.decode()
    except UnicodeDecodeError:
        shown = "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
    by = {"drafter": None, "probability": None}
    if guess is not None:
        by = {"drafter": guess.drafter, "probability": guess.chance}
    return {"token": shown, "bytes": list(text), **by, **more}


def expected() -> list[dict[str, Any]]:
    first, one, two, three, *rest = IDS
    last = [token(each, guess(each), source="accepted") for each in (*rest, END)]
    return [
        step(0, 0.5, 0, 0, [token(first, source="plain")]),
        step(
            1,
            0.75,
            3,
            1,
            [token(one, guess(one, 0.25, "other"), source="accepted"), token(two, source="bonus")],
        ),
        step(2, 1.0, 2, 0, [token(three, source="correction")], token(one, guess(one))),
        step(3, None, len(last), len(last), last),
    ]


def step(
    index: int, seconds: float | None, drafted: int, accepted: int, tokens: list[Any], rejected: Any = None
) -> dict[str, Any]:
    told = {"step": index, "seconds": seconds, "drafted": drafted, "accepted": accepted}
    return {**told, "tokens": tokens, "rejected": rejected}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_whole_and_in_a_stream(client_of: ClientOf, path: str) -> None:
    client = client_of(ScriptedRunner(MODEL, guessed))
    fields: dict[str, Any] = (
        {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    whole = (await client.post(f"/v1/{path}", json=fields | {"return_speculation": True})).json()
    assert whole["choices"][0]["speculation"] == {"steps": expected()}
    asked = fields | {"return_speculation": True, "stream": True}
    response = await client.post(f"/v1/{path}", json=asked)
    chunks = [httpx.Response(200, text=line[6:]).json() for line in response.text.split("\n") if "{" in line]
    told = [
        chunk["choices"][0]["speculation"]["steps"]
        for chunk in chunks
        if "speculation" in chunk["choices"][0]
    ]
    assert told == [[one] for one in expected()]
    for stream in (False, True):
        unasked = await client.post(f"/v1/{path}", json=fields | {"stream": stream})
        assert "speculation" not in unasked.text.replace("speculative", "")
    refused = await client.post(f"/v1/{path}", json=fields | {"return_speculation": "yes"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_speculation"


async def test_who_has_a_part_of_a_step_gets_the_rest_of_it(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(MODEL, guessed))
    asked = {"prompt": "a", "return_speculation": True, "stream": True}
    first = (await client.post("/v1/completions", json=asked)).text.split("\n")[0]
    id = first.removeprefix("id: ").partition(":")[0]
    rest = (await client.get(f"/v1/sessions/{id}/events?after=2")).text
    chunks = [httpx.Response(200, text=line[6:]).json() for line in rest.split("\n") if "{" in line]
    told = [one for chunk in chunks for one in chunk["choices"][0].get("speculation", {"steps": []})["steps"]]
    whole = expected()
    assert told == [{**whole[1], "tokens": whole[1]["tokens"][1:]}, *whole[2:]]


async def test_a_stop_string_ends_what_is_told(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(MODEL, guessed))
    asked = {"prompt": "a", "return_speculation": True, "stop": piece(TOKENIZER, IDS[1]).decode()}
    choice = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
    assert [len(one["tokens"]) for one in choice["speculation"]["steps"]] == [1, 1]
    assert choice["speculation"]["steps"][1]["rejected"] is None


async def test_grpc() -> None:
    server = new_server()
    add_generation_service(server, Intake(ScriptedRunner(MODEL, guessed), lambda below: 0), Metrics())
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        stub: Any = generation_pb2_grpc.GenerationStub(connection)
        request = generation_pb2.GenerateRequest(text="a", return_speculation=True)
        deltas = [one.delta async for one in stub.Generate(request) if one.HasField("delta")]
        steps = [delta.step for delta in deltas if delta.HasField("step")]
        assert [[each.token.token_id for each in one.tokens] for one in steps] == [
            list(delta.token_ids) for delta in deltas if delta.token_ids
        ]
        for found, wanted in zip(steps, expected(), strict=True):
            assert (found.index, found.drafted, found.accepted) == (
                wanted["step"],
                wanted["drafted"],
                wanted["accepted"],
            )
            assert (found.seconds if found.HasField("seconds") else None) == wanted["seconds"]
            assert found.HasField("rejected") == (wanted["rejected"] is not None)
            for one, token in zip(found.tokens, wanted["tokens"], strict=True):
                assert generation_pb2.Source.Name(one.source) == f"SOURCE_{token['source'].upper()}"
                assert one.token.piece == bytes(token["bytes"])
                by = (
                    (one.token.drafter, one.token.probability)
                    if one.token.HasField("probability")
                    else (None, None)
                )
                assert by == (token["drafter"], token["probability"])
        plain = stub.Generate(generation_pb2.GenerateRequest(text="a"))
        assert not [one async for one in plain if one.delta.HasField("step")]
    await server.stop(0)
