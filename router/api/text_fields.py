"""The fields that say when a text ends, and what of its tokens it has."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from outrider.wire.logprobs import MAX_TOP_LOGPROBS
from router.api.fields import Fields, json_type, refused

MAX_STOP_TOKENS = 1024
MAX_BEST_OF = 64
MAX_ID = 2**31 - 1


def stop_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise refused(f"must be an array of token ids, not {json_type(value)}")
    if len(value) > MAX_STOP_TOKENS:
        raise refused(f"must be at most {MAX_STOP_TOKENS} token ids, not {len(value)}")
    return token_ids(value)


def token_ids(value: list[Any]) -> tuple[int, ...]:
    for index, item in enumerate(value):
        if type(item) is not int:
            raise refused(f"must be token ids (integers) throughout; item {index} is {json_type(item)}")
    return tuple(value)


StopTokens = Annotated[list[Annotated[int, Field(ge=0, le=MAX_ID)]], Field(max_length=MAX_STOP_TOKENS)]


class TextFields(Fields):
    """Fields that are vLLM's, by name and meaning."""

    stop_token_ids: Annotated[
        tuple[int, ...], PlainValidator(stop_tokens, json_schema_input_type=StopTokens)
    ] = Field(default=(), description="Each ends the text, as the model's own end-of-text token does.")
    min_tokens: int = Field(
        default=0,
        description="Least output tokens: before that nothing ends the text.",
        json_schema_extra={"minimum": 0},
    )
    include_stop_str_in_output: bool = Field(
        default=False, description="The text has what ended it: a stop string, or a stop token's text."
    )
    prompt_logprobs: int | None = Field(
        default=None,
        description="Log-probabilities of the prompt, and of so many likeliest tokens.",
        json_schema_extra={"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    )
    best_of: int | None = Field(
        default=None,
        description="Answers that are made for each prompt; the n likeliest of them are told. Not streamed.",
        json_schema_extra={"minimum": 1, "maximum": MAX_BEST_OF},
    )
    skip_special_tokens: bool = Field(default=True, description="Special tokens give no text.")
