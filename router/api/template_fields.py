"""The fields that say how a conversation becomes a prompt."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from outrider.errors import InvalidRequest
from router.api.fields import Fields, json_type, refused, shown, sized
from router.rendering import OWN_VARIABLES, Rendering

MAX_VARIABLES = 16
MAX_VARIABLES_BYTES = 16 * 1024  # as JSON
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORT: dict[str, Any] = {"enum": [*EFFORTS, None]}
VARIABLES: dict[str, Any] = {"type": "object", "maxProperties": MAX_VARIABLES}


def variables(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(f"must be an object, not {json_type(value)}")
    if len(value) > MAX_VARIABLES:
        raise refused(f"must have at most {MAX_VARIABLES} entries, not {len(value)}")
    if own := sorted(OWN_VARIABLES & value.keys()):
        raise refused(f"must not have {own[0]}: it has its own value")
    return dict(sized(value, MAX_VARIABLES_BYTES))


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns what chat templates read: Qwen's and GLM's, DeepSeek's and Granite's, and that of others."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}


def effort(value: object) -> str:
    if value not in EFFORTS:
        raise refused(f"must be one of {', '.join(EFFORTS)}, not {shown(value)}")
    return str(value)


class TemplateFields(Fields):
    """Fields that are vLLM's, by name and meaning."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="The prompt ends where the assistant's answer begins; absent = unless "
        "continue_final_message.",
    )
    continue_final_message: bool = Field(default=False, description="The answer goes on with the last turn.")
    chat_template_kwargs: Annotated[dict[str, Any], PlainValidator(variables), WithJsonSchema(VARIABLES)] = (
        Field(default_factory=dict, description="Variables of the chat template.")
    )

    reasoning_effort: Annotated[str | None, PlainValidator(effort), WithJsonSchema(EFFORT)] = Field(
        default=None, description="How much to think, as the chat template knows it."
    )

    @property
    def rendering(self) -> Rendering:
        """Raises InvalidRequest if they contradict each other."""
        goes_on = self.continue_final_message
        if goes_on and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message goes on with a turn, add_generation_prompt begins one: give one",
                field="add_generation_prompt",
            )
        begins = not goes_on if self.add_generation_prompt is None else self.add_generation_prompt
        return Rendering(
            begins, goes_on, {**effort_variables(self.reasoning_effort), **self.chat_template_kwargs}
        )
