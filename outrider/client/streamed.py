"""A streamed answer as its client has it. Server-sent events come in, and each piece of text goes out
once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError, Overloaded, Superseded, Unavailable

DONE = "[DONE]"
FOR_NOW = frozenset({Unavailable.kind, Overloaded.kind, Superseded.kind})  # errors after which it may go on

MOST_BYTES = 64 << 20  # of an event
NO_ANSWER = (ValueError, KeyError, TypeError, AttributeError)  # what reading JSON of another form raises


def no_answer() -> OutriderError:
    return OutriderError("the server's stream is no answer: is it Outrider?")


class Broken(Exception):
    """The answer is not complete, and may go on over another connection."""

    def __init__(
        self, message: str, *, retry_after: float = 0.0, reached: bool = True, cut: bool = False
    ) -> None:
        """`retry_after` is for how many seconds the router asks to wait. `reached` tells whether anybody
        took the request, `cut` whether a connection ended before it should."""
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.reached = reached
        self.cut = cut


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """html.spec.whatwg.org, server-sent events."""

    data: str
    id: str | None


def server_sent_events(pieces: Iterable[bytes], most_bytes: int = MOST_BYTES) -> Iterator[ServerSentEvent]:
    """Yields the events that have data and came whole. What the end of a connection has cut is dropped, as
    the specification says. Lines end in a newline alone, as Outrider writes them. Raises OutriderError if one
    has more bytes than that."""
    rest = bytearray()
    for piece in pieces:
        looked_at = max(len(rest) - 1, 0)
        rest += piece
        while (end := rest.find(b"\n\n", looked_at)) >= 0:
            looked_at = 0
            block = rest[:end].decode(errors="replace")
            del rest[: end + 2]
            fields = dict(_field(line) for line in block.split("\n"))
            if "data" in fields:
                yield ServerSentEvent(fields["data"], fields.get("id"))
        if len(rest) > most_bytes:
            raise no_answer()


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")  # a comment is a field without a name
    return name, value.removeprefix(" ")


class StreamedAnswer:
    """What has come of one answer, over all its connections."""

    def __init__(self) -> None:
        self.event_id: str | None = None  # of the last event that had one: where to go on
        self.last: dict[str, Any] = {}  # the last chunk
        self.begun = False  # an event of this telling has come
        self.done = False
        self._given: dict[int, list[str]] = {}  # pieces of text, by index of the choice
        self._repeated: dict[int, str] = {}  # of these, what is yet to come again

    @property
    def complete(self) -> bool:
        """True if nothing but the end of the stream is missing."""
        return bool(self.last.get("usage"))

    def restart(self) -> None:
        """Expects the answer from its beginning again. The same text must come, and is not given a second
        time."""
        self.event_id, self.begun = None, False
        self._repeated = {index: "".join(pieces) for index, pieces in self._given.items()}

    def read(self, event: ServerSentEvent) -> str:
        """Returns the text that is new with this event, perhaps none.

        Raises Broken or OutriderError if the event is an error. Raises OutriderError if it is no part of an
        answer, or belongs to another answer than the one that began.
        """
        if event.data == DONE:
            self.done = True
            return ""
        try:
            chunk = json.loads(event.data)
            if "error" in chunk:
                raise _error(chunk["error"])
            text = "".join(
                self._new(choice.get("index", 0), _text(choice) or "") for choice in chunk["choices"]
            )
            text.encode()  # half of a surrogate pair is no text
        except (*NO_ANSWER, RecursionError):
            raise no_answer() from None
        self.begun = True
        self.last = chunk
        self.event_id = event.id or self.event_id
        return text

    def _new(self, index: int, text: str) -> str:
        repeated = self._repeated.get(index, "")
        length = min(len(repeated), len(text))
        if text[:length] != repeated[:length]:
            raise OutriderError(
                "the answer cannot go on: it was begun again, and became another; send the request again"
            )
        self._repeated[index] = repeated[length:]
        self._given.setdefault(index, []).append(text[length:])
        return text[length:]


def _text(choice: dict[str, Any]) -> str | None:
    text: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text


def _error(error: dict[str, Any]) -> Broken | OutriderError:
    message = str(error["message"])
    return Broken(message) if error.get("type") in FOR_NOW else OutriderError(message)
