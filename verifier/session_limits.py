"""What a session may ask for, so that it can run here at all."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import InvalidRequest
from outrider.wire.logprobs import MAX_PROMPT_LOGPROBS, MAX_TOP_LOGPROBS
from verifier.session import SessionSpec


@dataclass(frozen=True, slots=True)
class SessionLimits:
    vocab_size: int
    max_context: int  # tokens of the model's context
    slots: int  # tokens that the KV pool holds

    def check(self, spec: SessionSpec) -> None:
        """Raises InvalidRequest, naming the field and the limit, if the session could never run."""
        params, total = spec.params, spec.params.most_tokens
        if not params.prompt:
            raise InvalidRequest("prompt must hold at least one token", field="prompt")
        if max((*params.prompt, *spec.output)) >= self.vocab_size:
            raise InvalidRequest(f"prompt: token ids go from 0 to {self.vocab_size - 1}", field="prompt")
        if len(params.prediction) > self.max_context:
            raise InvalidRequest(
                f"prediction has {len(params.prediction)} tokens; the context has {self.max_context}",
                field="prediction",
            )
        if params.prediction and max(params.prediction) >= self.vocab_size:
            raise InvalidRequest(
                f"prediction: token ids go from 0 to {self.vocab_size - 1}", field="prediction"
            )
        if not len(spec.output) < params.max_tokens:
            raise InvalidRequest(
                f"max_tokens must be more than the {len(spec.output)} tokens of output so far",
                field="max_tokens",
            )
        if total > self.max_context:
            raise InvalidRequest(
                f"prompt and max_tokens come to {total} tokens; the context has {self.max_context}",
                field="max_tokens",
            )
        if total > self.slots:
            raise InvalidRequest(
                f"prompt and max_tokens come to {total} tokens; the KV pool holds {self.slots}"
                " (see --kv-memory)",
                field="max_tokens",
            )
        if params.logprobs is not None and params.logprobs > MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"logprobs must be at most {MAX_TOP_LOGPROBS}, not {params.logprobs}", field="logprobs"
            )
        count = params.prompt_logprobs
        if count is not None and (
            count > MAX_TOP_LOGPROBS or len(params.prompt) * (1 + count) > MAX_PROMPT_LOGPROBS
        ):
            raise InvalidRequest(
                f"prompt_logprobs of {count} likeliest tokens are too many for a prompt of "
                f"{len(params.prompt)} tokens",
                field="prompt_logprobs",
            )
        params.sampling.validate(self.vocab_size)
