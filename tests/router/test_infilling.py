"""A text between two others."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from outrider.errors import InvalidRequest
from router.api import schema
from router.api.validation import prepare
from router.infilling import FORMS
from tests.router.api import scripted


@pytest.mark.parametrize("form", FORMS)
def test_the_prompt_is_as_the_model_knows_it(form: tuple[str, str, str]) -> None:
    tokenizer = scripted.byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in form])
    body = schema.parse(schema.CompletionRequest, {"prompt": "the fox", "suffix": " dog"})
    generation = prepare(body, scripted.served(tokenizer), lambda below: 0)
    first, last, between = map(tokenizer.token_to_id, form)
    bos = tokenizer.token_to_id(scripted.BOS)
    fox, dog = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("the fox", " dog"))
    assert generation.sessions[0].params.prompt == (bos, first, *fox, last, *dog, between)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no tokens for a text between two others"),
        ({"prompt": [5, 6]}, "suffix is for a prompt of text"),
        ({"echo": True}, "without echo"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    body = schema.parse(schema.CompletionRequest, {"prompt": "the fox", "suffix": " dog", **fields})
    with pytest.raises(InvalidRequest, match=message) as refused:
        prepare(body, scripted.served(scripted.byte_level()), lambda below: 0)
    assert refused.value.field == "suffix"
