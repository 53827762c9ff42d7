"""Text to tokens and back, as vLLM's server offers it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.errors import ContextExceeded, InvalidRequest
from router import tokenizer
from router.api.answers import Counted, Detokenized, Tokenized
from router.api.body import MAX_BODY_BYTES
from router.api.schema import DetokenizeRequest, TokenizeRequest
from router.api.tools import Tool
from router.api.turns import ChatMessage
from router.api.validation import check_bytes, check_ids, most_uncounted, rendered
from router.rendering import Rendering
from router.requests import ServedModel


def tokenized(body: TokenizeRequest, model: ServedModel) -> Tokenized:
    """Raises InvalidRequest naming the field. It takes time that grows with the text."""
    built = tokenizer.load(model.tokenizer)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give prompt or messages: one of them", field="prompt")
    if body.messages is not None:
        text = rendered(body.messages, built, model, body.tools, body.rendering)
        special = body.add_special_tokens is True  # a template writes them itself
    else:
        text = body.prompt or ""
        special = body.add_special_tokens is not False
        check_bytes("prompt", text, built, model)
    ids = built.encode(text) if special else built.encode_rendered(text)
    return {
        "count": len(ids),
        "max_model_len": model.max_context,
        "tokens": list(ids),
        "token_strs": built.tokens(ids) if body.return_token_strs else None,
    }


def counted(
    turns: Iterable[ChatMessage], tools: Sequence[Tool], model: ServedModel, rendering: Rendering
) -> Counted:
    """Returns how many tokens a conversation is. Raises InvalidRequest."""
    built = tokenizer.load(model.tokenizer)
    return {"input_tokens": len(built.encode_rendered(rendered(list(turns), built, model, tools, rendering)))}


def detokenized(body: DetokenizeRequest, model: ServedModel) -> Detokenized:
    """Raises InvalidRequest naming the field."""
    most = most_uncounted(model)  # a few bytes of each may be a hundred of text
    if len(body.tokens) > most:
        raise ContextExceeded(
            f"tokens has {len(body.tokens)} token ids, and may have {most} where the context has "
            f"{model.max_context}",
            field="tokens",
        )
    check_ids("tokens", body.tokens, model)
    built = tokenizer.load(model.tokenizer)
    if built.writes_more(body.tokens, MAX_BODY_BYTES):
        raise InvalidRequest(
            f"tokens are a text of more than {MAX_BODY_BYTES} characters: send fewer", field="tokens"
        )
    return {"prompt": built.decode(body.tokens, skip_special_tokens=False)}


def described(model: ServedModel) -> dict[str, Any]:
    """Returns what a client needs to make prompts by itself."""
    files = model.tokenizer
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_context,
        "chat_template": files.chat_template or None,
        **files.special_tokens,
    }
