from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.sampling.params import SamplingParams
from router.api import schema
from router.api.fields import UNSUPPORTED
from router.api.validation import Generation, prepare
from router.tokenizer import PIECE, Tokenizer
from tests.router.api import scripted

TOKENIZER = scripted.byte_level()
MODEL = scripted.served(TOKENIZER)
VOCAB = MODEL.vocab_size
FOX = tuple(TOKENIZER.encode("the fox").ids)


def made(body: dict[str, Any]) -> Generation:
    kind = schema.ChatRequest if "messages" in body else schema.CompletionRequest
    return prepare(schema.parse(kind, body), MODEL, lambda limit: limit - 1)


def completion(**fields: Any) -> Generation:
    return made({"prompt": "the fox", **fields})


def test_defaults() -> None:
    generation = completion()
    (session,) = generation.sessions
    assert session.params.prompt == FOX
    assert session.params.sampling == SamplingParams(seed=2**53 - 1)
    assert (session.model, session.params.max_tokens, session.params.stop_token_ids) == (
        "demo",
        16,
        tuple(sorted(MODEL.eos_token_ids)),
    )
    assert session.num_speculative_tokens is None
    assert generation.stop.strings == ()


@pytest.mark.parametrize("body", [{"prompt": "%s"}, {"messages": [{"role": "user", "content": "%s"}]}])
def test_a_long_text_that_cannot_fit_is_refused_before_it_is_tokenized_whole(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """Tokenizing takes up to 260 bytes of memory for each of the text's."""
    roomy, asked = replace(MODEL, max_context=6000), list[int]()
    encode = Tokenizer._encode
    monkeypatch.setattr(
        Tokenizer, "_encode", lambda self, text, **how: asked.append(len(text)) or encode(self, text, **how)
    )
    kind = schema.ChatRequest if "messages" in body else schema.CompletionRequest
    filled = json.loads(json.dumps(body).replace("%s", "the fox " * 10_000))
    with pytest.raises(InvalidRequest, match="has more than 6000 tokens"):
        prepare(schema.parse(kind, filled), roomy, lambda limit: 1)
    assert asked and max(asked) <= PIECE


def test_the_default_length_is_cut_to_the_room_and_a_chat_gets_all_of_it() -> None:
    prompt = [7] * 60
    assert completion(prompt=prompt).sessions[0].params.max_tokens == 4
    chat = made({"messages": [{"role": "user", "content": "hi"}]}).sessions[0]
    assert chat.params.max_tokens == MODEL.max_context - len(chat.params.prompt)


def test_every_field_arrives() -> None:
    generation = completion(
        model="demo",
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.25,
        seed=2**64 - 1,
        stop=["a", "b"],
        n=1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={"3": -100, "4": 1.5},
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        num_speculative_tokens=0,
    )
    (session,) = generation.sessions
    assert session.params.sampling == SamplingParams(
        temperature=0,
        top_k=0,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={3: -100, 4: 1.5},
        seed=2**64 - 1,
    )
    assert (session.params.max_tokens, session.params.stop_token_ids, session.num_speculative_tokens) == (
        5,
        (),
        0,
    )
    assert generation.stop.strings == ("a", "b")


def test_null_is_absent_for_every_optional_field() -> None:
    names = schema.CompletionRequest.model_fields.keys() - {"prompt"}
    assert completion(**dict.fromkeys(names)).sessions == completion().sessions
    nulls = {"include_usage": None, "continuous_usage_stats": None}
    assert completion(stream=True, stream_options=nulls).sessions == completion().sessions


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the fox", [FOX]),
        (["the fox", "the fox"], [FOX, FOX]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
def test_kinds_of_prompt(prompt: object, expected: list[tuple[int, ...]]) -> None:
    generation = completion(prompt=prompt)
    assert [session.params.prompt for session in generation.sessions] == expected
    assert len({session.params.sampling.seed for session in generation.sessions}) == 1


def test_text_parts_are_joined_and_both_names_of_max_tokens_work() -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    whole = made({"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 3})
    assert made({"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 3}) == whole


CHAT = [{"role": "user", "content": "hi"}]

# field values, what the message must say
BAD = {
    "empty salt": ({"cache_salt": ""}, "cache_salt", "must not be empty"),
    "long salt": ({"cache_salt": "ö" * 513}, "cache_salt", "must be at most 1024 bytes, not 1026"),
    "number as salt": ({"cache_salt": 7}, "cache_salt", "must be a string, not an integer"),
    "empty prompt": ({"prompt": ""}, "prompt", "prompt is empty: it takes at least one token"),
    "no ids": ({"prompt": []}, "prompt", "prompt must not be empty"),
    "one of the prompts empty": ({"prompt": ["a", ""]}, "prompt", "prompt[1] is empty"),
    "an empty list of ids": ({"prompt": [[5], []]}, "prompt", "prompt[1] is empty"),
    "null prompt": ({"prompt": None}, "prompt", "prompt is required"),
    "prompt of another type": ({"prompt": 3}, "prompt", "prompt must be a string, an array of strings"),
    "mixed prompts": ({"prompt": ["a", 3]}, "prompt", "item 0 is a string and item 1 is an integer"),
    "mixed ids": ({"prompt": [3, "a"]}, "prompt", "item 1 is a string"),
    "boolean id": ({"prompt": [3, True]}, "prompt", "item 1 is a boolean"),
    "too many prompts": ({"prompt": ["a"] * 129}, "prompt", "at most 128 prompts, not 129"),
    "surrogate": ({"prompt": "a\ud800"}, "prompt", "character 1 is half of a surrogate pair"),
    "prompt over the context": (
        {"prompt": [5] * 64},
        "prompt",
        "prompt has 64 tokens; the context of 64 takes at most 63",
    ),
    "id beyond the vocabulary": (
        {"prompt": [5, VOCAB]},
        "prompt",
        f"token id {VOCAB} at index 1; ids go from 0 to {VOCAB - 1}",
    ),
    "negative id": ({"prompt": [[5], [-1]]}, "prompt", "prompt[1] has token id -1 at index 0"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", "max_tokens must be from 1 to"),
    "max_tokens over the room": (
        {"prompt": [5] * 60, "max_tokens": 5},
        "max_tokens",
        "from 1 to 4 here, not 5: the prompt has 60 tokens and the context holds 64",
    ),
    "max_completion_tokens": ({"max_completion_tokens": 0}, "max_completion_tokens", "not 0"),
    "two lengths": (
        {"max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
        "max_tokens is 3 and max_completion_tokens is 4",
    ),
    "max_tokens true": ({"max_tokens": True}, "max_tokens", "must be an integer, not a boolean"),
    "max_tokens as text": ({"max_tokens": "5"}, "max_tokens", "must be an integer, not a string"),
    "max_tokens 1.5": ({"max_tokens": 1.5}, "max_tokens", "must be an integer, not 1.5"),
    "temperature below 0": ({"temperature": -0.1}, "temperature", "temperature must be in [0, 100]"),
    "temperature NaN": ({"temperature": math.nan}, "temperature", "must be a finite number, not nan"),
    "temperature inf": ({"temperature": math.inf}, "temperature", "must be a finite number, not inf"),
    "temperature as text": ({"temperature": "1"}, "temperature", "must be a number, not a string"),
    "temperature true": ({"temperature": True}, "temperature", "must be a number, not a boolean"),
    "temperature of 400 digits": ({"temperature": 10**400}, "temperature", "temperature must be"),
    "top_p 0": ({"top_p": 0}, "top_p", "top_p must be in (0, 1]"),
    "top_k": ({"top_k": -2}, "top_k", "top_k must be 0 or -1 (off) or an integer up to 2^31 - 1, not -2"),
    "min_p": ({"min_p": 1.1}, "min_p", "min_p must be in [0, 1]"),
    "presence_penalty": ({"presence_penalty": 2.1}, "presence_penalty", "[-2, 2]"),
    "frequency_penalty": ({"frequency_penalty": -2.1}, "frequency_penalty", "[-2, 2]"),
    "repetition_penalty": ({"repetition_penalty": 1e-40}, "repetition_penalty", "[0.01, 100]"),
    "seed below 0": ({"seed": -1}, "seed", f"seed must be an integer from 0 to {2**64 - 1}"),
    "seed over 64 bits": ({"seed": 2**64}, "seed", f"from 0 to {2**64 - 1}"),
    "n": ({"n": 65}, "n", "n must be in [1, 64], not 65"),
    "no n": ({"n": 0}, "n", "n must be in [1, 64], not 0"),
    "n of prompts": ({"prompt": ["a", "b", "c"], "n": 43}, "n", "n must be at most 42 with 3 prompts"),
    "logprobs": ({"logprobs": 21}, "logprobs", "logprobs must be in [0, 20], not 21"),
    "logprobs as flag": ({"logprobs": True}, "logprobs", "logprobs must be an integer"),
    "top_logprobs": (
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
        "top_logprobs",
        "top_logprobs needs logprobs = true",
    ),
    "n as text": ({"n": "1"}, "n", "n must be an integer"),
    "17 stops": ({"stop": ["x"] * 17}, "stop", "stop must be at most 16 strings, not 17"),
    "empty stop": ({"stop": ""}, "stop", "stop must not hold an empty string"),
    "stop of another type": ({"stop": 3}, "stop", "stop must be a string or an array of strings"),
    "stop with a number": ({"stop": ["a", 3]}, "stop", "stop must be a string, not an integer"),
    "biases": (
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        "logit_bias",
        "must have at most 1024 token ids, not 1025",
    ),
    "bias key": ({"logit_bias": {"x": 1}}, "logit_bias", "must have token ids as keys, not 'x'"),
    "bias twice": (
        {"logit_bias": {"5": 1, "05": 2}},
        "logit_bias",
        "different token ids as keys; 5 is there",
    ),
    "bias id": ({"logit_bias": {"9999": 1}}, "logit_bias", f"ids go from 0 to {VOCAB - 1}"),
    "bias value": ({"logit_bias": {"3": 101}}, "logit_bias", "[-100, 100]"),
    "bias NaN": ({"logit_bias": {"3": math.nan}}, "logit_bias", "[-100, 100]"),
    "bias of another type": ({"logit_bias": {"3": "1"}}, "logit_bias", "that of token id 3 is a string"),
    "bias list": ({"logit_bias": [1]}, "logit_bias", "must be an object from token ids to numbers"),
    "ignore_eos": ({"ignore_eos": 1}, "ignore_eos", "must be true or false, not an integer"),
    "stream": ({"stream": "yes"}, "stream", "must be true or false, not a string"),
    "stream option unknown": (
        {"stream": True, "stream_options": {"foo": 1}},
        "stream_options.foo",
        "unknown field stream_options.foo",
    ),
    "continuous without usage": (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "needs stream_options.include_usage",
    ),
    "k below 0": (
        {"num_speculative_tokens": -1},
        "num_speculative_tokens",
        "from 0 (off) to 1024, or absent (adaptive), not -1",
    ),
    "unknown field": ({"temprature": 1}, "temprature", "unknown field temprature"),
    "unknown field null": ({"temprature": None}, "temprature", "unknown field temprature"),
    "unsupported": (
        {"truncate_prompt_tokens": 1},
        "truncate_prompt_tokens",
        "truncate_prompt_tokens is not supported by this server",
    ),
    "huge bias": ({"logit_bias": {"5": 10**400}}, "logit_bias", "in [-100, 100]; that of token id 5"),
    "no messages": ({"messages": []}, "messages", "messages must not be empty"),
    "messages text": ({"messages": "hi"}, "messages", "messages must be an array, not a string"),
    "message text": ({"messages": ["hi"]}, "messages[0]", "messages[0] must be an object, not a string"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    "role": (
        {"messages": [{"role": "robot", "content": ""}]},
        "messages[0].role",
        "messages[0].role must be one of system, developer, user, assistant, tool, not 'robot'",
    ),
    "message field": (
        {"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[1].tool_calls",
        "messages[1].tool_calls must have function.name and function.arguments in each; call 0 has not",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "part 0 is of type 'image_url'",
    ),
    "part of another type": (
        {"messages": [{"role": "user", "content": ["x"]}]},
        "messages[0].content",
        "part 0 is a string",
    ),
    "part with more": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]},
        "messages[0].content",
        'fields "type" and "text" only; part 0 has not',
    ),
    "template refuses": (
        {"messages": [*CHAT, {"role": "system", "content": "x"}]},
        "messages",
        "refused by the model's chat template: system comes first",
    ),
    "long chat": (
        {"messages": [{"role": "user", "content": "x" * 100}]},
        "messages",
        "the context of 64 takes at most 63",
    ),
}


@pytest.mark.parametrize(("fields", "field", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_names_the_field_and_the_limit(fields: dict[str, Any], field: str, message: str) -> None:
    body = fields if "messages" in fields else {"prompt": "the fox", **fields}
    with pytest.raises(InvalidRequest) as refused:
        made(body)
    assert message in refused.value.message
    assert refused.value.field == field
    assert "\n" not in refused.value.message and "pydantic" not in refused.value.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED - schema.CompletionRequest.model_fields.keys()))
def test_what_is_not_supported_is_said_to_be_so(name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} (is not supported by this server|must be of type)"):
        completion(**{name: 17})
    completion(**{name: None})  # asks for nothing


HABITS: dict[str, Any] = {
    "user": "u-1",
    "metadata": {"run": "7"},
    "store": False,
    "service_tier": "auto",
    "response_format": {"type": "text"},
    "best_of": 1,
    "echo": False,
    "top_logprobs": 0,
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "stop_token_ids": [],
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "bad_words": [],
    "min_tokens": 0,
}
CHAT_HABITS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "functions": [],
    "logprobs": False,
    "modalities": ["text"],
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "include_reasoning": True,
}


def test_what_clients_send_by_habit_changes_nothing() -> None:
    assert completion(**HABITS, suffix="").sessions == completion().sessions
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    cached = {"cache_control": {"x": 1}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    named = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief", **cached}]},
        {"role": "user", "content": "hi", "name": "ada", "tool_calls": [], "refusal": None},
    ]
    expected = made({"messages": plain}).sessions
    assert made({"messages": named, **HABITS, **CHAT_HABITS}).sessions == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": True}, "store is not supported by this server, but for false"),
        ({"response_format": {"type": "xml"}}, "text, json_object, json_schema or structural_tag"),
        ({"use_beam_search": True}, "use_beam_search is not supported by this server, but for false"),
        ({"user": 5}, "user must be of type string"),
        ({"user": "é" * 600}, "user must be at most 1024 bytes"),
        (
            {"service_tier": "flex"},
            'service_tier is not supported by this server, but for "auto" or "default"',
        ),
        ({"messages": CHAT, "functions": [{}]}, "functions is not supported by this server, but for []"),
        ({"tools": []}, "tools is not supported by this server"),
        ({"parallel_tool_calls": True, "tools": [{}]}, "tools is not supported by this server"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(fields if "messages" in fields else {"prompt": "the fox", **fields})
    assert message in refused.value.message


@pytest.mark.parametrize("body", ["text", [1], None, 3])
def test_a_body_that_is_no_object(body: object) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        schema.parse(schema.CompletionRequest, json.loads(json.dumps(body)))
