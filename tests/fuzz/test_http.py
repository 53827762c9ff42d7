"""The HTTP API by its own OpenAPI document: no input fails it, and it answers as the document says."""

from __future__ import annotations

import json

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.conftest import ANSWER_SECONDS, Service, fuzzed
from tests.router.api import scripted

pytestmark = [pytest.mark.process, pytest.mark.fuzz, pytest.mark.timeout(3600)]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
BODY_SHARE = 0.07  # of all inputs, for each endpoint that takes a body
PLAIN_SHARE = 0.01
BYTES_SHARE = 0.1


documented = schemathesis.openapi.from_dict(
    scripted.application().openapi()
)  # as it is served, which another test holds


@documented.include(method="POST").parametrize()
@fuzzed(BODY_SHARE)
def test_what_takes_a_body(service: Service, case: schemathesis.Case) -> None:
    case.call_and_validate(base_url=service.url, checks=CHECKS, timeout=ANSWER_SECONDS)


@documented.exclude(method="POST").parametrize()
@fuzzed(PLAIN_SHARE)
def test_what_takes_none(service: Service, case: schemathesis.Case) -> None:
    case.call_and_validate(base_url=service.url, checks=CHECKS, timeout=ANSWER_SECONDS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)
near = st.dictionaries(
    st.sampled_from(
        [
            "prompt",
            "messages",
            "input",
            "system",
            "max_tokens",
            "temperature",
            "stop",
            "seed",
            "stream",
            "logit_bias",
            "tools",
            "tool_choice",
            "text",
            "include",
            "thinking",
            "reasoning",
            "reasoning_effort",
            "chat_template_kwargs",
            "response_format",
            "structured_outputs",
            "stop_token_ids",
            "min_tokens",
            "prompt_logprobs",
            "best_of",
            "n",
            "echo",
            "suffix",
            "priority",
            "return_speculation",
            "prediction",
            "output_config",
            "parallel_tool_calls",
            "cache_salt",
            "stream_options",
            "num_speculative_tokens",
            "logprobs",
            "top_logprobs",
        ]
    ),
    json_values,
).map(lambda fields: {"prompt": "a", "max_tokens": 2, **fields})
bodies = st.one_of(
    st.binary(max_size=200),
    json_values.map(lambda value: json.dumps(value).encode(errors="surrogatepass")),
    near.map(lambda value: json.dumps(value).encode(errors="surrogatepass")),
    st.integers(1, 3000).map(lambda depth: b"[" * depth),
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "content-type": st.sampled_from(["application/json", "text/plain", "multipart/form-data", "x"]),
        "content-encoding": st.sampled_from(["gzip", "identity", "br"]),
        "last-event-id": st.sampled_from(["", ":", "0" * 32 + ":1", "0" * 32 + ":" + "9" * 30, "x" * 500]),
        "accept": st.sampled_from(["text/event-stream", "*/*", ""]),
    },
)
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/nowhere"]


def test_bodies_that_are_no_request(service: Service) -> None:
    with httpx.Client(base_url=service.url, timeout=ANSWER_SECONDS, trust_env=False) as http:

        @fuzzed(BYTES_SHARE)
        @given(st.sampled_from(PATHS), bodies, headers)
        def send(path: str, body: bytes, headers: dict[str, str]) -> None:
            response = http.post(path, content=body, headers=headers)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

        send()
    service.check()


def test_all_is_as_before(service: Service) -> None:
    """The last test of this file."""
    service.check()
