"""Reasoning on every route: whole, in streams, after a break; and a grammar that begins behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.session import FinishReason
from router.api import schema
from router.api.reading import Formats
from router.api.validation import Generation, prepare
from router.reasoning import FORMATS, GRANITE, MISTRAL, QWEN3, ReasoningFormat
from router.requests import ServedModel, SessionEnded
from router.tool_formats import HERMES
from tests.router.api.scripted import Logs, ScriptedRunner, byte_level, files, served, steps
from tests.router.api.test_grpc import Connect, connect  # noqa: F401 (a fixture)
from tests.router.api.test_http import ClientOf
from tests.router.api.test_structured import obeys
from tests.router.api.test_tool_answers import copied
from tests.router.api.test_tool_routes import validate
from tests.router.api.test_tools import TOOLS, WEATHER, written

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' }}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}"
    "{% if enable_thinking is defined %}{{ '<think>' }}{{ '\n' if enable_thinking else '</think>' }}"
    "{% endif %}{% endif %}"
)
THOUGHT, ANSWER = "Fox or dog?\nA fox.", "the fox"
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
RESPONSE: dict[str, Any] = {"input": "hi"}
MESSAGE: dict[str, Any] = {**CHAT, "max_tokens": 400}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tokenizer() -> Any:
    made = byte_level()
    made.add_tokens(
        [AddedToken(tag, special=False) for tag in (QWEN3.opening, QWEN3.closing, *HERMES.markers)]
    )
    made.add_special_tokens([MISTRAL.opening, MISTRAL.closing])
    return made


TOKENIZER = tokenizer()


def model(template: str = TEMPLATE) -> ServedModel:
    return replace(served(TOKENIZER, max_context=4096), tokenizer=files(TOKENIZER, template))


MODEL = model()


def saying(text: str, width: int = 3, logs: Logs | None = None, forgets: int = 0) -> ScriptedRunner:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    script = [*steps(ids, width)[:-1], SessionEnded(FinishReason.STOP)]
    return ScriptedRunner(MODEL, lambda request: script, logs, forgets)


def events(text: str) -> list[tuple[str, str]]:
    """(id, data) of each."""
    told = [dict(line.split(": ", 1) for line in event.split("\n")) for event in text.strip().split("\n\n")]
    return [(event.get("id", ""), event["data"]) for event in told]


def tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


THINKING_TOKENS = tokens(SAID.partition("</think>")[0]) + 1


async def test_a_whole_answer_on_every_route(client_of: ClientOf) -> None:
    client = client_of(saying(SAID))
    chat = (await client.post("/v1/chat/completions", json={**CHAT, "n": 2})).json()
    validate("/v1/chat/completions", chat)
    for choice in chat["choices"]:
        message = choice["message"]
        assert message["content"] == ANSWER
        assert message["reasoning"] == message["reasoning_content"] == THOUGHT
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * THINKING_TOKENS}
    response = (await client.post("/v1/responses", json=RESPONSE)).json()
    validate("/v1/responses", response)
    thought, said = response["output"]
    assert (thought["type"], thought["content"]) == (
        "reasoning",
        [{"type": "reasoning_text", "text": THOUGHT}],
    )
    assert (said["content"][0]["text"], response["status"]) == (ANSWER, "completed")
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": THINKING_TOKENS}
    message = (await client.post("/v1/messages", json=MESSAGE)).json()
    validate("/v1/messages", message)
    assert message["content"] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""},
        {"type": "text", "text": ANSWER, "citations": None},
    ]
    completion = (await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 400})).json()
    assert completion["choices"][0]["text"] == SAID
    assert "completion_tokens_details" not in completion["usage"]


async def test_it_is_text_if_it_is_not_looked_for(client_of: ClientOf) -> None:
    client = client_of(saying(SAID), formats=Formats(reasoning="none"))
    answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["choices"][0]["message"]["content"] == SAID
    assert "completion_tokens_details" not in answer["usage"]


async def test_what_is_cut_off_amid_it_has_no_text(client_of: ClientOf) -> None:
    client = client_of(saying("<think>\nFox or"))
    (choice,) = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"]
    assert choice["message"]["content"] is None and choice["message"]["reasoning"] == "Fox or"
    response = (await client.post("/v1/responses", json=RESPONSE)).json()
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    message = (await client.post("/v1/messages", json=MESSAGE)).json()
    assert [block["type"] for block in message["content"]] == ["thinking"]


async def test_tools_are_called_after_it(client_of: ClientOf) -> None:
    call = ("weather", '{"city": "x"}')
    inner = written(HERMES, ("clock", "{}"))  # of a call that it only thinks of
    client = client_of(
        saying(f"<think>{inner}</think>\n\nSo:\n{written(HERMES, call)}"), formats=Formats("hermes")
    )
    (choice,) = (await client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS})).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("So:", inner)
    (told,) = choice["message"]["tool_calls"]
    assert (told["function"]["name"], told["function"]["arguments"]) == call


def put_together(told: list[Any]) -> tuple[str, str]:
    deltas = [choice["delta"] for chunk in told for choice in chunk["choices"]]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    return "".join(delta.get("reasoning", "") for delta in deltas), "".join(
        delta.get("content") or "" for delta in deltas
    )


async def test_a_stream_and_its_resumption_at_another_router(client_of: ClientOf) -> None:
    logs: Logs = {}
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    first = events((await client_of(saying(SAID, 2, logs)).post("/v1/chat/completions", json=body)).text)
    told = [json.loads(data) for _, data in first[:-1]]
    assert put_together(told) == (THOUGHT, ANSWER)
    assert told[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": THINKING_TOKENS}
    for cut, (id, _) in [one for one in enumerate(first[:-1]) if one[1][0]][::4]:
        again = client_of(saying(SAID, 5, copied(logs), forgets=3))
        rest = await again.post("/v1/chat/completions", json=body, headers={"last-event-id": id})
        more = [json.loads(data) for _, data in events(rest.text)[:-1]]
        assert put_together(told[: cut + 1] + more) == (THOUGHT, ANSWER)
        assert more[-1]["usage"] == told[-1]["usage"]


async def test_usage_so_far_tells_which_tokens_are_reasoning(client_of: ClientOf) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": usage, "return_speculation": True}
    told = events((await client_of(saying(SAID, 2)).post("/v1/chat/completions", json=body)).text)
    chunks = [json.loads(data) for _, data in told[:-2]]
    counts = [
        chunk["usage"].get("completion_tokens_details", {}).get("reasoning_tokens", 0) for chunk in chunks
    ]
    assert counts == sorted(counts) and counts[-1] == THINKING_TOKENS
    for chunk, count in zip(chunks, counts, strict=True):
        assert count == min(chunk["usage"]["completion_tokens"], THINKING_TOKENS)


async def test_streams_of_the_other_routes(client_of: ClientOf) -> None:
    client = client_of(saying(SAID, 2))
    told = events((await client.post("/v1/messages", json={**MESSAGE, "stream": True})).text)
    blocks: dict[int, dict[str, Any]] = {}
    for event in (json.loads(data) for _, data in told):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks[event["index"]] = event["content_block"]
            case "content_block_delta":
                ((name, more),) = [(name, one) for name, one in event["delta"].items() if name != "type"]
                blocks[event["index"]][name] += more
    whole = (await client.post("/v1/messages", json=MESSAGE)).json()
    assert list(blocks.values()) == whole["content"]
    stops = [data for _, data in told if '"content_block_stop"' in data]
    assert len(stops) == 2
    told = events((await client.post("/v1/responses", json={**RESPONSE, "stream": True})).text)
    bodies = [json.loads(data) for _, data in told]
    numbers = [body["sequence_number"] for body in bodies]
    assert numbers == sorted(set(numbers))
    of_reasoning = [body for body in bodies if body["type"] == "response.reasoning_text.delta"]
    assert "".join(body["delta"] for body in of_reasoning) == THOUGHT
    assert all((body["output_index"], body["content_index"]) == (0, 0) for body in of_reasoning)
    said = [body for body in bodies if body["type"] == "response.output_text.delta"]
    assert "".join(body["delta"] for body in said) == ANSWER and {body["output_index"] for body in said} == {
        1
    }
    done = [body["item"] for body in bodies if body["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message"]
    assert done == bodies[-1]["response"]["output"]


async def test_over_grpc_and_after_a_break(connect: Connect) -> None:  # noqa: F811
    stub = generation_pb2_grpc.GenerationStub(await connect(saying(SAID, 2)))
    turns = [generation_pb2.ChatMessage(role="user", content="hi")]
    request = generation_pb2.GenerateRequest(chat=generation_pb2.Chat(messages=turns))
    told = [response async for response in stub.Generate(request)]

    def joined(told: list[Any]) -> tuple[str, str]:
        deltas = [response.delta for response in told if response.HasField("delta")]
        return "".join(delta.reasoning for delta in deltas), "".join(delta.text for delta in deltas)

    assert joined(told) == (THOUGHT, ANSWER)
    assert told[-1].completed.usage.reasoning_tokens == THINKING_TOKENS
    has = 0
    for count, response in enumerate(told[1:-1], 2):
        has += len(response.delta.token_ids)
        if count % 3 == 0:
            resume = generation_pb2.ResumeRequest(id=told[0].started.id, after=has)
            rest = [response async for response in stub.Resume(resume)]
            assert joined(told[:count] + rest) == (THOUGHT, ANSWER)


def asked(served_: ServedModel = MODEL, parser: str = "auto", **fields: Any) -> Generation:
    body = schema.parse(schema.ChatRequest, {**CHAT, **fields})
    return prepare(body, served_, lambda below: 0, Formats("hermes", parser))


def begun(**fields: Any) -> bool:
    reading = asked(**fields).wording.reasoning
    assert reading is not None
    return reading.begun


def test_a_prompt_that_begins_it() -> None:
    assert not begun() and begun(reasoning_effort="low") and not begun(reasoning_effort="none")
    assert begun(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="none")
    assert begun(parser="deepseek_r1") and not begun(parser="deepseek_r1", reasoning_effort="none")
    last = [*CHAT["messages"], {"role": "assistant", "content": "<think>so"}]
    assert begun(messages=last, continue_final_message=True)
    asks = [{"role": "user", "content": "what is <think>"}]
    assert not begun(messages=asks)


@pytest.mark.parametrize(
    "form", [form for form in FORMATS.values() if not form.implied], ids=lambda form: form.name
)
def test_a_grammar_begins_behind_it(form: ReasoningFormat) -> None:
    thought = f'{form.opening} {{"a": "b"}} \n<{form.closing[:-1]} {form.closing}{form.gap}'
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}}
    rule = asked(parser=form.name, **fields).sessions[0].params.grammar
    texts = {
        '{"a": 5}': True,
        thought + '{"a": 5}': True,
        thought + '{"a": "5"}': False,
        thought: False,
        "the fox": False,
        form.opening + "the fox": False,
    }
    assert {text: obeys(rule, text, TOKENIZER, MODEL) for text in texts} == texts
    must = asked(parser=form.name, tools=TOOLS, tool_choice="required").sessions[0].params.grammar
    call = written(HERMES, ("weather", '{"city": "x"}'))
    assert obeys(must, thought + call, TOKENIZER, MODEL) and not obeys(must, thought, TOKENIZER, MODEL)
    either = asked(parser=form.name, tools=[WEATHER], **fields).sessions[0].params.grammar
    assert all(obeys(either, thought + end, TOKENIZER, MODEL) for end in (call, '{"a": 5}'))


def test_a_grammar_begins_behind_what_the_prompt_has_begun() -> None:
    fields = {"structured_outputs": {"choice": ["fox", "dog"]}, "reasoning_effort": "high"}
    rule = asked(**fields).sessions[0].params.grammar
    texts = {"hm</think>\n\nfox": True, "fox": False, "hm</think>fox": False, "hm</think>\n\ncat": False}
    assert {text: obeys(rule, text, TOKENIZER, MODEL) for text in texts} == texts
    assert asked(model("{{ messages }}"), **fields).sessions[0].params.grammar.count("THOUGHTS") == 0
    assert GRANITE.closing not in rule


async def test_it_may_be_sent_back_on_every_route(client_of: ClientOf) -> None:
    runner = saying(ANSWER)
    client = client_of(runner)
    user = {"role": "user", "content": "hi"}
    item = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    block = {"type": "thinking", "thinking": "hm", "signature": ""}
    for path, body in (
        (
            "chat/completions",
            {"messages": [user, {"role": "assistant", "content": "so", "reasoning": "hm"}, user]},
        ),
        (
            "chat/completions",
            {"messages": [user, {"role": "assistant", "content": "so", "reasoning_content": "hm"}, user]},
        ),
        ("responses", {"input": [user, item, {"role": "assistant", "content": "so"}, user]}),
        (
            "messages",
            {
                "messages": [
                    user,
                    {"role": "assistant", "content": [block, {"type": "text", "text": "so"}]},
                    user,
                ],
                "max_tokens": 30,
            },
        ),
    ):
        answer = await client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
    prompts = {request.params.prompt for request in runner.requests}
    assert [TOKENIZER.decode(prompt) for prompt in prompts] == [
        "user: hi\nassistant: <think>hm</think>so\nuser: hi\nassistant:"
    ]
    secret = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    answer = await client.post("/v1/responses", json={"input": [secret, user]})
    assert TOKENIZER.decode(runner.requests[-1].params.prompt) == "user: hi\nassistant:"
    assert (await client.post("/v1/responses", json={"input": [secret]})).status_code == 400


async def test_how_much_to_think_is_told_to_the_template(client_of: ClientOf) -> None:
    runner = saying(ANSWER)
    client = client_of(runner)
    for path, body in (
        ("chat/completions", {**CHAT, "reasoning_effort": "high"}),
        ("responses", {**RESPONSE, "reasoning": {"effort": "high", "summary": "auto"}}),
        ("messages", {**MESSAGE, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("messages", {**MESSAGE, "output_config": {"effort": "high"}}),
    ):
        answer = await client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        assert TOKENIZER.decode(runner.requests[-1].params.prompt).endswith("assistant:<think>\n")
    for path, body, message in (
        ("chat/completions", {**CHAT, "reasoning_effort": "much"}, "reasoning_effort must be one of none"),
        ("responses", {**RESPONSE, "reasoning": {"effort": "much"}}, "reasoning must be one of none"),
        ("responses", {**RESPONSE, "reasoning": {"summary": "detailed"}}, "must have no summary but auto"),
        ("messages", {**MESSAGE, "thinking": {"type": "enabled", "budget": 1}}, "has the field 'budget'"),
    ):
        answer = await client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
