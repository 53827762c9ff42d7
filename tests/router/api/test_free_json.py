"""JSON that clients make up as they like goes to templates, grammars and answers: what one of these cannot
take is refused by name, and never costs an internal error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from router.api.body import MAX_DEPTH
from tests.router.api import scripted

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    "{{ tools | tojson if tools }}{{ extra | tojson if extra }}"
)
ODD_ONE = "here is what is odd"
USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"
FUNCTION = {"name": "f", "parameters": ODD_ONE}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": ODD_ONE}
BODIES = {
    "tools": (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}),
    "chat_template_kwargs": (CHAT, {"messages": [USER], "chat_template_kwargs": {"extra": ODD_ONE}}),
    "response_format": (
        CHAT,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"schema": ODD_ONE}},
        },
    ),
    "responses' tools": ("/v1/responses", {"input": [USER], "tools": [{"type": "function", **FUNCTION}]}),
    "messages' tools": (
        "/v1/messages",
        {"max_tokens": 4, "messages": [USER], "tools": [{"name": "f", "input_schema": ODD_ONE}]},
    ),
    "messages' calls": (
        "/v1/messages",
        {"max_tokens": 4, "messages": [{"role": "assistant", "content": [USE]}, USER]},
    ),
}
ODD = {
    "half of a pair": ('{"description":"\\ud800"}', "must be valid Unicode"),
    "half of a pair as a name": ('{"\\udfff":{}}', "must be valid Unicode"),
    "no number": ('{"default":NaN}', "must have finite numbers only"),
    "no finite number": ('{"default":-1e400}', "must have finite numbers only"),
    "deep": ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "nested more than 100 deep"),
}


@pytest.fixture
def client(client_of: Callable[..., httpx.AsyncClient], tokenizer: scripted.Tokenizer) -> httpx.AsyncClient:
    model = replace(
        scripted.served(tokenizer, max_context=4096), tokenizer=scripted.files(tokenizer, TEMPLATE)
    )
    return client_of(scripted.ScriptedRunner(model, lambda _: scripted.steps([5, 6, 7])))


def body(where: str, odd: str) -> tuple[str, str]:
    path, form = BODIES[where]
    return path, json.dumps(form).replace(json.dumps(ODD_ONE), odd)


@pytest.mark.parametrize("where", BODIES)
@pytest.mark.parametrize("what", ODD)
async def test_what_not_all_can_take_is_refused(client: httpx.AsyncClient, where: str, what: str) -> None:
    odd, message = ODD[what]
    path, content = body(where, odd)
    response = await client.post(path, content=content)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize("odd", [one for one, _ in ODD.values()] + ["[" * 10_000, "9" * 5000])
async def test_arguments_that_are_no_json_of_use_are_a_text_to_the_template(
    client: httpx.AsyncClient, odd: str
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": odd}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    response = await client.post("/tokenize", json={"messages": turns})
    assert response.status_code == 200
    told = await client.post("/detokenize", json={"tokens": response.json()["tokens"]})
    assert json.dumps(odd) in told.json()["prompt"]


async def test_as_deep_as_may_be_goes_through(client: httpx.AsyncClient) -> None:
    room = MAX_DEPTH - 8
    path, content = body("responses' tools", '{"a":' * room + "1" + "}" * room)
    response = await client.post(path, content=content)
    assert response.status_code == 200
