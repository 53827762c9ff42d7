"""What the API keeps in a session's log, and a whole answer made again from it, by this router or another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from outrider.errors import Unavailable, UnknownSession, unknown_session
from outrider.wire.session import SessionId
from router import tokenizer
from router.api.access import count_sessions, owner
from router.api.position import companion
from router.api.threads import Retelling, Threads
from router.api.validation import Generation
from router.api.wording import Wording
from router.call_reading import CallReading
from router.requests import Recalled, ServedModel, SessionRunner
from router.stop import StopStrings


@dataclass(frozen=True, slots=True)
class Record:
    """The part of a request that its sessions do not hold. It is kept with the first session."""

    shape: str  # name of the Shape
    created: int  # unix seconds
    prompts: int  # sessions: each prompt has `n`
    stop: tuple[str, ...]
    include_usage: bool = True  # in a stream of its events
    continuous_usage_stats: bool = False
    n: int = 1
    calls: CallReading | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)  # fields of the request that its answer repeats
    wording: Wording = field(default=Wording())

    def to_bytes(self) -> bytes:
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        # What `repeated` has is JSON, up to thousands of parts: asdict would copy each, on the loop.
        return json.dumps(told, default=asdict, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Record:
        """Returns the record in the bytes. Raises ValueError, KeyError or TypeError if they are none."""
        told = json.loads(raw)
        calls = CallReading(**told["calls"]) if told["calls"] else None
        wording = Wording.from_json(told["wording"])
        stop = tuple(told["stop"])
        return cls(**told | {"stop": stop, "calls": calls, "wording": wording})


def named(generation: Generation, session_id: SessionId) -> Generation:
    """Returns the generation with an id for each session; that of the first is the answer's."""
    sessions = (
        replace(session, session_id=companion(session_id, index), owner=owner())
        for index, session in enumerate(generation.sessions)
    )
    return replace(generation, sessions=tuple(sessions))


async def sessions_of(
    runner: SessionRunner, session_id: SessionId, threads: Threads
) -> tuple[SessionId, ...]:
    """Returns the sessions of the request whose first one this is. If keys are asked for, raises
    UnknownSession unless this key's owner began it; else one of which nothing is known is the only one. Its
    log may be long, and has a place as where it is told again: raises Overloaded."""
    try:
        with threads.retelling(owner()):
            prompts = _record(await runner.recall(session_id)).prompts
    except (UnknownSession, Unavailable):
        if owner():
            raise
        prompts = 1
    return tuple(companion(session_id, index) for index in range(prompts))


def _record(first: Recalled) -> Record:
    """Returns the record. Raises UnknownSession if it is another key owner's, or a later prompt's."""
    if first.request.owner != owner():
        raise unknown_session()
    try:
        return Record.from_bytes(first.answer)
    except (ValueError, KeyError, TypeError):
        raise UnknownSession(
            "this session has no answer of its own: give the id that its client was told"
        ) from None


async def recalled(
    runner: SessionRunner, session_id: SessionId, retelling: Retelling
) -> tuple[Record, Generation]:
    """Returns an answer as it was begun, and counts its sessions.

    Raises what the runner's `recall` and `model` raise; UnknownSession also for that of a later prompt or of
    another key's owner; Overloaded; and
    Unavailable where another checkpoint is served under the model's name now."""
    first = await runner.recall(session_id)
    record = _record(first)
    count_sessions(record.prompts)
    retelling.hold(_tokens(first))
    requests = [first.request]
    for index in range(1, record.prompts):  # one after the other: they may be long
        other = await runner.recall(companion(session_id, index))
        retelling.hold(_tokens(other))
        requests.append(other.request)
    model = runner.model(requests[0].model)
    if requests[0].fingerprint not in (None, model.fingerprint):
        raise Unavailable(f"another checkpoint of {model.name!r} is served now; send the request again")
    built, stop = await retelling.run(_built, model, session_id, record.stop)
    return record, Generation(model, built, tuple(requests), stop, record.n, record.calls, record.wording)


def _tokens(recalled: Recalled) -> int:
    """Returns the tokens of a session's log; twelve numbers that are told of them take as much as one."""
    params = recalled.request.params
    asked_for = (params.prompt_logprobs, len(params.prompt)), (params.logprobs, recalled.output_tokens)
    return sum(tokens * (12 + (0 if top is None else 1 + top)) // 12 for top, tokens in asked_for)


def _built(
    model: ServedModel, session_id: SessionId, stop: tuple[str, ...]
) -> tuple[tokenizer.Tokenizer, StopStrings]:
    return tokenizer.load(model.tokenizer), _stop_strings(session_id, stop)


@lru_cache(maxsize=64)  # by session: how long it takes tells nobody what others have asked for
def _stop_strings(session_id: SessionId, strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)
