"""How a conversation becomes a prompt: fields of vLLM's, rendered as transformers renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from outrider.net.rpc import bind, channel, new_server
from outrider.v1 import generation_pb2, generation_pb2_grpc
from router.api.grpc_generation import add_generation_service
from router.api.intake import Intake
from router.metrics import Metrics
from router.requests import ServedModel
from tests.router.api import scripted
from tests.router.api.scripted import ScriptedRunner, byte_level, served, steps

TOKENIZER = byte_level()
TEMPLATE = (
    "{%- for message in messages %}{{ '[' + message.role + ']' + message.content + '[/]' }}{% endfor %}"
    "{%- if style is defined %}{{ '(' + style.name + ')' }}{% endif %}"
    "{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
TURNS = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "over "}]
ClientOf = Callable[..., httpx.AsyncClient]


def model(template: str = TEMPLATE) -> ServedModel:
    made = served(TOKENIZER, max_context=256)
    files = scripted.files(TOKENIZER, template)
    return ServedModel(**{name: getattr(made, name) for name in ServedModel.__slots__} | {"tokenizer": files})


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "[user]fox[/][assistant]over [/][assistant]"),
    ({"add_generation_prompt": False}, "[user]fox[/][assistant]over [/]"),
    ({"continue_final_message": True}, "[user]fox[/][assistant]over "),
    ({"continue_final_message": True, "add_generation_prompt": False}, "[user]fox[/][assistant]over "),
    (
        {"chat_template_kwargs": {"style": {"name": "x"}}},
        "[user]fox[/][assistant]over [/](x)[assistant]",
    ),
    ({"chat_template_kwargs": {"bos_token": "ignored"}}, "[user]fox[/][assistant]over [/][assistant]"),
]


@pytest.mark.parametrize(("fields", "prompt"), CASES)
async def test_the_prompt_is_what_they_say(client_of: ClientOf, fields: dict[str, Any], prompt: str) -> None:
    runner = ScriptedRunner(model(), lambda request: steps([70]))
    client = client_of(runner)
    expected = tuple(TOKENIZER.encode(prompt, add_special_tokens=False).ids)
    response = await client.post("/v1/chat/completions", json={"messages": TURNS, **fields})
    assert response.status_code == 200, response.text
    told = (await client.post("/tokenize", json={"messages": TURNS, **fields})).json()
    assert tuple(told["tokens"]) == expected
    server = new_server()
    add_generation_service(server, Intake(runner, lambda below: 0), Metrics())
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel(address) as connection:
        stub: Any = generation_pb2_grpc.GenerationStub(connection)
        turns = [generation_pb2.ChatMessage(**turn) for turn in TURNS]
        given = {**fields}
        if "chat_template_kwargs" in given:
            given["chat_template_kwargs"] = httpx.Response(200, json=given["chat_template_kwargs"]).text
        chat = generation_pb2.Chat(messages=turns, **given)
        [one async for one in stub.Generate(generation_pb2.GenerateRequest(chat=chat))]
    await server.stop(0)
    assert [request.params.prompt for request in runner.requests] == [expected] * 2


async def test_a_template_that_trims_takes_the_blanks(client_of: ClientOf) -> None:
    runner = ScriptedRunner(
        model(TEMPLATE.replace("message.content", "message.content | trim")), lambda _: steps([70])
    )
    fields = {"messages": TURNS, "continue_final_message": True}
    assert (await client_of(runner).post("/v1/chat/completions", json=fields)).status_code == 200
    (request,) = runner.requests
    assert TOKENIZER.decode(request.params.prompt) == "[user]fox[/][assistant]over"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "give one"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must not have messages"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object, not an array"),
        ({"chat_template_kwargs": dict.fromkeys("abcdefghijklmnopq", 1)}, "at most 16 entries, not 17"),
        ({"chat_template_kwargs": {"a": "x" * 20_000}}, "may have 16384 bytes as JSON"),
        ({"chat_template_kwargs": {"style": 5}}, "refused by the model's chat template"),
    ],
)
async def test_what_cannot_be_is_refused(client_of: ClientOf, fields: dict[str, Any], message: str) -> None:
    client = client_of(ScriptedRunner(model(), lambda request: steps([70])))
    response = await client.post("/v1/chat/completions", json={"messages": TURNS, **fields})
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


async def test_a_template_that_leaves_the_last_message_out(client_of: ClientOf) -> None:
    client = client_of(ScriptedRunner(model("{{ messages[0].content }}"), lambda request: steps([70])))
    fields = {"messages": TURNS, "continue_final_message": True}
    response = await client.post("/v1/chat/completions", json=fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == "continue_final_message"
