from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.client.streamed import Broken, ServerSentEvent, StreamedAnswer, server_sent_events
from outrider.errors import OutriderError, Unavailable

EVENTS = [
    ServerSentEvent("a: b", "i:1"),
    ServerSentEvent('{"x":"\u2028\x85é"}', None),
    ServerSentEvent("[DONE]", None),
]
WIRE = b": keep-alive\n: keep-alive\n" + b"".join(
    (f"id: {event.id}\n" if event.id else "").encode() + f"data: {event.data}\n\n".encode()
    for event in EVENTS
)


@given(st.lists(st.integers(0, len(WIRE))))
def test_events_come_whole_however_the_bytes_come(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(WIRE)]
    pieces = [WIRE[start:end] for start, end in pairwise(ends)]
    assert list(server_sent_events(pieces)) == EVENTS


@given(st.integers(0, len(WIRE)))
def test_what_the_end_has_cut_is_dropped(end: int) -> None:
    whole = WIRE[:end].count(b"\n\n")
    assert list(server_sent_events([WIRE[:end]])) == EVENTS[:whole]


def event(text: str, index: int = 0, id: str | None = "s:1") -> ServerSentEvent:
    return ServerSentEvent(json.dumps({"choices": [{"index": index, "text": text}]}), id)


@given(st.lists(st.text(max_size=4), max_size=6), st.data())
def test_told_again_in_other_pieces_it_is_given_once(pieces: list[str], data: st.DataObject) -> None:
    answer = StreamedAnswer()
    whole = "".join(pieces)
    has = "".join(answer.read(event(piece)) for piece in pieces[: data.draw(st.integers(0, len(pieces)))])
    for _ in range(2):
        answer.restart()
        assert answer.event_id is None and not answer.begun
        ends = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=4))})
        for start, end in pairwise(ends):
            has += answer.read(event(whole[start:end]))
    assert has == whole


def test_choices_are_told_apart() -> None:
    answer = StreamedAnswer()
    assert [answer.read(event(text, index)) for text, index in (("ab", 0), ("xy", 1))] == ["ab", "xy"]
    answer.restart()
    assert [answer.read(event(text, index)) for text, index in (("x", 1), ("abc", 0), ("yz", 1))] == [
        "",
        "c",
        "z",
    ]


def test_where_to_go_on_stays_what_the_last_event_with_an_id_said() -> None:
    answer = StreamedAnswer()
    answer.read(event("a", id="s:1"))
    answer.read(event("", id=None))
    assert answer.event_id == "s:1" and not answer.complete and not answer.done
    answer.read(ServerSentEvent('{"choices":[],"usage":{"completion_tokens":1}}', None))
    assert answer.complete and not answer.done
    answer.read(ServerSentEvent("[DONE]", None))
    assert answer.done


@pytest.mark.parametrize("data", ["", "7", "{}", "[]", '{"choices":[7]}', '{"choices":[{}]}', '{"error":7}'])
def test_what_is_no_answer(data: str) -> None:
    with pytest.raises(OutriderError, match="is it Outrider"):
        StreamedAnswer().read(ServerSentEvent(data, None))


def test_errors_are_final_or_not() -> None:
    for kind, error in ((Unavailable.kind, Broken), ("cancelled_error", OutriderError)):
        with pytest.raises(error, match="so it is"):
            StreamedAnswer().read(
                ServerSentEvent(json.dumps({"error": {"message": "so it is", "type": kind}}), None)
            )
