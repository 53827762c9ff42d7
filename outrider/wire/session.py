"""A session as it was asked for, its id, and why it is over: plain data that all roles share."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

from outrider.sampling.params import SamplingParams

SessionId = NewType("SessionId", bytes)
SESSION_ID_BYTES = 16
MAX_CACHE_SALT_BYTES = 32
MAX_TENANT_BYTES = 32
MAX_PRIORITY = 2**31 - 1


def new_session_id(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> SessionId:
    """Returns a fresh id. Ids come from the system's secure source outside tests: they must not be
    guessable."""
    return SessionId(random_bytes(SESSION_ID_BYTES))


class FinishReason(IntEnum):
    """Why a session is over; the values are outrider.v1.FinishReason's."""

    CANCELLED = 0  # its client or an operator ended it: "unspecified" on the wire
    STOP = 1  # a stop token or a stop string
    LENGTH = 2  # max_tokens or the context is reached

    @property
    def openai(self) -> str:
        """The reason in OpenAI's words, "stop" or "length"; or in vLLM's: "abort"."""
        return "abort" if self is FinishReason.CANCELLED else self.name.lower()


@dataclass(frozen=True, slots=True)
class SessionParams:
    """What a session was asked for: it never changes, wherever the session goes on."""

    prompt: tuple[int, ...]  # token ids, at least one
    sampling: SamplingParams
    max_tokens: int  # most output tokens, those committed elsewhere before included
    stop_token_ids: tuple[int, ...] = ()  # ids that end the session; the last token committed
    cache_salt: bytes = b""  # cached prefixes are shared among sessions of the same salt only
    logprobs: int | None = (
        None  # the likeliest tokens told at each position, besides the own one; None = neither
    )
    grammar: str = (
        ""  # that the output obeys up to its end-of-text token, as llguidance writes it; empty = none
    )
    guesses: bool = False  # each step comes with the draft tokens that it verified
    min_tokens: int = 0  # least output tokens: before that none of stop_token_ids is drawn
    priority: int = 0  # sessions of a greater one give way to those of less
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt
    tenant: bytes = b""  # whose it is: tenants' prompts are read in turns; empty = one for all
    prediction: Sequence[int] = ()  # that the output is expected to be like; for the verifier alone

    def __post_init__(self) -> None:
        """Keeps a prediction in 4 bytes a token: it may be as long as the context, and needs no room in a KV
        pool, so that all sessions may have one at a time."""
        if not isinstance(self.prediction, array):
            object.__setattr__(self, "prediction", array("I", self.prediction))

    @property
    def bulk(self) -> int:
        """Returns about how many bytes it has on its way to a worker."""
        ids = len(self.prompt) + len(self.prediction) + len(self.stop_token_ids)
        return 4 * ids + 16 * len(self.sampling.logit_bias) + len(self.grammar)

    @property
    def most_tokens(self) -> int:
        """The most tokens that prompt and output can come to together."""
        return len(self.prompt) + self.max_tokens

    @property
    def first_sampling(self) -> SamplingParams | None:
        """Returns how the first `min_tokens` output tokens are drawn; None if as all others. Each call makes
        it anew."""
        if not (self.min_tokens and self.stop_token_ids):
            return None
        return self.sampling.barring(self.stop_token_ids)
