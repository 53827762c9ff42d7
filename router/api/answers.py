"""What the API answers, as JSON names and types. They are plain dictionaries, not checked when sent."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from outrider.sampling.params import RANGES
from router.api.figures import CachedTokens, Count, GenerationMetrics, ReasoningTokens, Totals

Seed = Annotated[int, Field(json_schema_extra=dict(RANGES["seed"].json_schema()))]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class Answer(Totals):
    """What both kinds of whole answer have."""

    id: str
    created: Annotated[int, Field(description="Unix seconds.")]
    model: str
    seed: Seed


class CompletionLogprobs(TypedDict):
    """Log-probabilities of the model itself: before penalties, biases, temperature and cuts."""

    tokens: list[str]
    token_logprobs: Annotated[list[float | None], Field(description="Null for the first of a prompt.")]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class GuessedToken(TypedDict):
    token: str
    bytes: list[Count]
    drafter: Annotated[
        str | None,
        Field(description="Who had guessed it: a drafter, prediction or grammar; empty = not known."),
    ]
    probability: Annotated[
        float | None,
        Field(ge=0, le=1, description="That its drafter gave it, if all before it are right."),
    ]


class TokenOrigin(GuessedToken):
    source: Annotated[
        Literal["accepted", "correction", "bonus", "plain"],
        Field(
            description="A drafter had guessed it; or it is the target's own: in the place of a wrong guess, "
            "after guesses that were all right, or in a step without guesses."
        ),
    ]


class TargetStep(TypedDict):
    """One step of the target."""

    step: Annotated[int, Field(ge=0, description="Counted from the first of the answer.")]
    seconds: Annotated[
        float | None,
        Field(ge=0, description="Since the answer was begun; null where only the session's log tells of it."),
    ]
    drafted: Count
    accepted: Count
    tokens: list[TokenOrigin]
    rejected: Annotated[
        GuessedToken | None, Field(description="The guess in whose place the target took another token.")
    ]


class StepsTold(TypedDict):
    """Where the tokens came from."""

    steps: list[TargetStep]


class PromptLogprob(TypedDict):
    """vLLM's, of a token at a position of the prompt."""

    logprob: float
    rank: Annotated[int, Field(ge=1, description="1 = the likeliest.")]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None], Field(description="If asked for: by token id; null for the first.")
]


class CompletionChoice(TypedDict):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    speculation: NotRequired[StepsTold]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(Answer):
    """The answer to a prompt, or to several."""

    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]


class FunctionCall(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="As the model wrote them: JSON, if nothing cut it off.")]


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[Annotated[str, Field(description="What the model thought before it answered.")]]
    reasoning_content: NotRequired[Annotated[str, Field(description="The same, under its other name.")]]
    tool_calls: NotRequired[list[ToolCall]]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the model itself: before penalties, biases, temperature and cuts."""

    content: list[TokenLogprob]
    refusal: None


class ChatChoice(TypedDict):
    index: Count
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    speculation: NotRequired[StepsTold]


class Chat(Answer):
    """The next turn of a conversation."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    prompt_logprobs: NotRequired[PromptLogprobs]


class MessageText(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class MessageThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, Field(description="Empty: nothing is signed.")]


class ToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[
        dict[str, object], Field(description="Empty if what the model wrote is no object, or was cut off.")
    ]


class MessageUsage(TypedDict):
    input_tokens: Annotated[int, Field(ge=0, description="Of the prompt, without those found cached.")]
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class AnthropicMessage(TypedDict):
    """The next turn of a conversation, in Anthropic's shape."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageThinking | MessageText | ToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "abort"]
    stop_sequence: str | None
    usage: MessageUsage
    seed: Seed
    metrics: GenerationMetrics


class Counted(TypedDict):
    """The tokens of a conversation."""

    input_tokens: Count


class AnthropicRefusal(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicRefusal


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: Literal["completed", "incomplete"]
    summary: list[str]
    content: Annotated[list[dict[str, str]], Field(description="Parts of type reasoning_text.")]


class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens", "abort"]


class ResponseUsage(TypedDict):
    input_tokens: Count
    input_tokens_details: CachedTokens
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


class Response(TypedDict):
    """The next turn of a conversation, as OpenAI's Responses tell it. Fields that are not listed are always
    the same."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="Unix seconds.")]
    status: Literal["completed", "incomplete"]
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    store: Literal[False]
    temperature: float
    top_p: float
    usage: ResponseUsage
    seed: Seed
    metrics: GenerationMetrics


class Permission(TypedDict):
    """What vLLM tells of each model, because OpenAI once did: every client may use it."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: None
    is_blocking: bool


class Model(TypedDict):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    permission: list[Permission]
    max_model_len: Annotated[int, Field(ge=1)]
    numerics: Annotated[
        list[str], Field(description="Of its target workers: those of one give the same logits to the bit.")
    ]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokenized(TypedDict):
    """The tokens of a text."""

    count: Count
    max_model_len: Annotated[int, Field(ge=1)]
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The text of tokens."""

    prompt: str


class Version(TypedDict):
    version: str


class Refusal(TypedDict):
    message: str
    type: str
    param: Annotated[str | None, Field(description="The field at fault.")]
    code: str | None


class Error(TypedDict):
    error: Refusal
