"""How an answer is told on the route where it was asked for: whole, in events, and how it fails amid them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import OutriderError
from router.api import messages, responses_api
from router.api.connection import ServerSentEvent
from router.api.json_text import to_json
from router.api.messages import MessageTelling
from router.api.output import Details, Result
from router.api.position import Position
from router.api.record import Record
from router.api.responses import SHAPES, Envelope, Json, error_body
from router.api.responses_api import ResponseTelling
from router.api.stream import DONE, Items, events
from router.api.validation import Generation


class Telling(Protocol):
    """How one answer is told."""

    @property
    def from_start(self) -> bool:
        """True if a stream that is resumed is gone through from its first token."""
        ...

    def whole(self, texts: Sequence[str], results: Sequence[Result], details: Sequence[Details]) -> Json:
        """Returns the whole answer, of each session's text, result, and what is told of its tokens."""
        ...

    def events(self, items: Items, after: Position | None) -> AsyncGenerator[ServerSentEvent, None]:
        """Each event that a stream may go on after has an id. `after`: where a client that resumes is."""
        ...

    def refused(self, error: OutriderError) -> Sequence[ServerSentEvent]:
        """Returns the last events of a stream that fails."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkTelling:
    """Completions and chats, in chunks."""

    envelope: Envelope
    record: Record
    prompt_tokens: Sequence[int]
    from_start = False

    def whole(self, texts: Sequence[str], results: Sequence[Result], details: Sequence[Details]) -> Json:
        return self.envelope.whole(texts, results, details)

    def events(self, items: Items, after: Position | None) -> AsyncGenerator[ServerSentEvent, None]:
        return events(
            items,
            self.envelope,
            self.prompt_tokens,
            include_usage=self.record.include_usage,
            continuous_usage_stats=self.record.continuous_usage_stats,
            after=after,
        )

    def refused(self, error: OutriderError) -> Sequence[ServerSentEvent]:
        return ServerSentEvent(to_json(error_body(error))), DONE


def telling(record: Record, generation: Generation) -> Telling:
    session = generation.sessions[0]
    assert session.session_id is not None
    id, model, prompt = session.session_id, generation.model.name, len(session.params.prompt)
    if record.shape == messages.SHAPE:
        return MessageTelling(id, model, generation.seed, prompt)
    if record.shape == responses_api.SHAPE:
        return ResponseTelling(id, record.created, model, session.params.sampling, record.repeated)
    shape = SHAPES[record.shape]
    envelope = Envelope(shape, id, record.created, model, generation.seed, record.wording.best or record.n)
    return ChunkTelling(envelope, record, [len(each.params.prompt) for each in generation.told])
