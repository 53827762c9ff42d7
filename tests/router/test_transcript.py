"""A transcript and its records."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from outrider.net.draft_right import MOST_SEATS
from outrider.sampling.params import SamplingParams
from outrider.wire.guesses import DrafterCounts, Guess, OwnCounts
from outrider.wire.logprobs import Logprob, PromptLogprobs
from outrider.wire.session import FinishReason, SessionId, SessionParams
from outrider.wire.verifier_sessions import Committed
from router.requests import GenerationRequest, TokensCommitted
from router.transcript import MOST_BESIDE, Transcript
from tests.router.asking import request

ID = SessionId(bytes(range(16)))
BOTH = (DrafterCounts(0, 2, 0, 1, "a"), DrafterCounts(1, 1, 0, 0, "b"))
STEPS = [
    TokensCommitted((10, 0, 12), 2, 4, 3, "float32-1"),
    TokensCommitted((2**31,), 0, 0),
    TokensCommitted((14,), 0, 2, numerics="bfloat16-2", own=OwnCounts(2, 0, 1, 0), drafters=BOTH),
]


def transcript(*steps: TokensCommitted, max_tokens: int = 50) -> Transcript:
    made = Transcript(
        request(
            session_id=ID,
            fingerprint="f",
            max_tokens=max_tokens,
            stop_token_ids=(3, 9),
            num_speculative_tokens=0,
        ),
        answer=b"kept",
    )
    for step in steps:
        made.add(step)
    return made


@pytest.mark.parametrize("end", [None, *FinishReason])
def test_it_is_the_same_after_it_was_written_and_read(end: FinishReason | None) -> None:
    written = transcript(*STEPS)
    written.end = end
    records = list(written.records(0))
    assert len(records) == written.length == 4 + (end is not None)
    read = Transcript.from_log(ID, b"".join(records))
    assert (read.request, read.answer) == (written.request, b"kept")
    assert [read.step(index) for index in range(read.steps)] == STEPS
    assert (read.output, read.log, read.end) == ([10, 0, 12, 2**31, 14], written.log, end)
    assert list(read.records(0)) == records
    assert (read.numerics, transcript(*STEPS[:2]).numerics, transcript().numerics) == (
        "bfloat16-2",
        "float32-1",
        "",
    )


@pytest.mark.parametrize("start", range(7))
def test_records_from_anywhere_are_the_rest_of_all(start: int) -> None:
    written = transcript(*STEPS)
    written.end = FinishReason.STOP
    assert list(written.records(start)) == list(written.records(0))[start:]


def test_where_it_ends() -> None:
    assert transcript().reached is None
    assert transcript(*STEPS).reached is None
    assert transcript(*STEPS, max_tokens=5).reached is FinishReason.LENGTH
    assert transcript(*STEPS, TokensCommitted((9,), 0, 0)).reached is FinishReason.STOP
    assert transcript(*STEPS, TokensCommitted((9,), 0, 0), max_tokens=6).reached is FinishReason.STOP
    assert transcript(TokensCommitted((9, 8), 0, 0)).reached is None, "only a last token ends it"
    cancelled = transcript(*STEPS, max_tokens=5)
    cancelled.end = FinishReason.CANCELLED
    assert cancelled.reached is FinishReason.CANCELLED


def test_nothing_follows_a_token_that_ends_the_text() -> None:
    made = transcript(*STEPS)  # 8 tokens

    def follow(*tokens: int, base: int = 8) -> bool:
        return made.continued_by(base, tokens, 0, 0, 2**32)

    assert follow(7, 3) and follow(3) and follow(14, 3, base=7) and not follow(3, 7) and not follow(3, 9)
    assert not follow(14, 3, 7, base=7)
    made.add(TokensCommitted((9,), 0, 0))
    assert follow(9) and not follow(9, 7) and not follow(7, base=9)
    begins = Transcript(request(session_id=ID, fingerprint="f", prompt=(5, 9), stop_token_ids=(9,)))
    assert begins.continued_by(2, [7], 0, 0, 10) and not begins.continued_by(2, [9, 7], 0, 0, 10)


def test_a_prompt_that_ends_in_a_stop_token_is_no_end() -> None:
    made = Transcript(request(session_id=ID, fingerprint="f", prompt=(5, 9), stop_token_ids=(9,)))
    assert made.reached is None


def test_log_probabilities_are_told_if_they_were_asked_for_and_only_then() -> None:
    top = ((3, -0.5), (4, -1.0))
    sound = (Logprob(-0.5, top), Logprob(-1.0, top))
    params = SessionParams((1, 2), SamplingParams(), 9, logprobs=2)
    asked = Transcript(GenerationRequest("m", params, session_id=SessionId(bytes(16)), fingerprint="f"))
    assert asked.scored_as_asked((3, 4), sound, None, 199)
    for odd in ((), sound[:1], (*sound, sound[0]), (Logprob(-0.5, top[:1]),) * 2):
        assert not asked.scored_as_asked((3, 4), odd, None, 199)
    assert not asked.scored_as_asked((3, 4), sound, None, 4)  # a token that there is not
    params = SessionParams((1, 2), SamplingParams(), 9)
    plain = Transcript(GenerationRequest("m", params, session_id=SessionId(bytes(16)), fingerprint="f"))
    assert plain.scored_as_asked((3, 4), (), None, 199) and not plain.scored_as_asked(
        (3, 4), sound, None, 199
    )
    asked.add(TokensCommitted((3, 4), 1, 1, logprobs=sound))
    asked.add(TokensCommitted((5,), 0, 0, logprobs=sound[:1]))
    again = Transcript.from_log(SessionId(bytes(16)), b"".join(asked.records(0)))
    assert [step.logprobs for step in again.known()] == [sound, sound[:1]]


def test_guesses_are_told_if_they_were_asked_for_and_only_then() -> None:
    sound = (Guess(3, 0.5, "d"), Guess(4, 1.0, ""), Guess(9, 0.0, "d"))

    def step(guesses: tuple[Guess, ...], tokens: tuple[int, ...] = (3, 4, 5)) -> Committed:
        return Committed(bytes(16), 1, 2, tokens, 2, 3, guesses=guesses)

    def made(asked: bool) -> Transcript:
        params = SessionParams((1, 2), SamplingParams(), 9, guesses=asked)
        return Transcript(GenerationRequest("m", params, session_id=ID, fingerprint="f"))

    asked = made(True)
    assert asked.guessed_as_asked(step(sound), 199) and asked.guessed_as_asked(step(()), 199)
    for index, odd in ((0, Guess(4, 0.5, "d")), (2, Guess(199, 0.5, "d")), (2, Guess(9, float("nan"), "d"))):
        assert not asked.guessed_as_asked(step((*sound[:index], odd, *sound[index + 1 :])), 199)
    for odd in (Guess(9, 1.5, "d"), Guess(9, 0.5, "d" * 257)):
        assert not asked.guessed_as_asked(step((*sound[:2], odd)), 199)
    assert not asked.guessed_as_asked(step(sound[:2]), 199)
    assert asked.guessed_as_asked(step(sound)._replace(beside=MOST_BESIDE), 199)
    assert not asked.guessed_as_asked(step(sound)._replace(beside=MOST_BESIDE + 1), 199)
    for own, sound_own in ((OwnCounts(3, 2, 1, 1), True), (OwnCounts(4, 2), False), (OwnCounts(3, 3), False)):
        assert asked.guessed_as_asked(step(sound)._replace(own=own), 199) is sound_own
    one = DrafterCounts(0, 3, 2, 1)
    assert asked.guessed_as_asked(step(sound)._replace(drafters=(one,) * MOST_SEATS), 199)
    assert not asked.guessed_as_asked(step(sound)._replace(drafters=(one,) * (MOST_SEATS + 1)), 199)
    for odd in ({"accepted": 3}, {"verified": 4}, {"verified": 1}, {"alone": 4}):
        assert not asked.guessed_as_asked(step(sound)._replace(drafters=(one._replace(**odd),)), 199)
    assert made(False).guessed_as_asked(step(()), 199) and not made(False).guessed_as_asked(step(sound), 199)
    asked.add(TokensCommitted((3, 4, 5), 2, 3, guesses=sound, seconds=0.5))
    asked.add(TokensCommitted((6,), 0, 0, beside=3, seconds=0.75))
    assert [(step.guesses, step.seconds) for step in asked.known()] == [(sound, 0.5), ((), 0.75)]
    again = Transcript.from_log(ID, b"".join(asked.records(0)))
    assert [(step.guesses, step.seconds) for step in again.known()] == [(sound, None), ((), None)]
    assert [step.beside for step in again.known()] == [0, 3]


def test_so_are_those_of_the_prompt_once() -> None:
    told = PromptLogprobs(array("f", [-1.5]), array("I", [7]), array("I", [3, 4]), array("f", [-0.5, -1]))
    params = SessionParams((1, 2), SamplingParams(), 9, prompt_logprobs=2)
    asked = Transcript(GenerationRequest("m", params, session_id=SessionId(bytes(16)), fingerprint="f"))
    assert asked.scored_as_asked((3,), (), told, 199)
    for odd in (None, PromptLogprobs(), replace(told, ranks=array("I"))):
        assert not asked.scored_as_asked((3,), (), odd, 199)
    assert not asked.scored_as_asked((3,), (), told, 4)  # a token that there is not
    asked.add(TokensCommitted((3,), 0, 0, prompt=told))
    asked.add(TokensCommitted((5,), 0, 0))
    assert not asked.scored_as_asked((3,), (), told, 199)
    again = Transcript.from_log(SessionId(bytes(16)), b"".join(asked.records(0)))
    assert [step.prompt for step in again.known()] == [told, None]
