"""A session in the draft model's own tokens beside the same in its target's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from drafter.retokenized import RetokenizedSession
from drafter.session import CannotFollow, DraftSession, DraftSpec, Guess
from outrider.sampling.params import SamplingParams
from outrider.vocabulary import Vocabulary
from outrider.wire.session import SessionParams
from tests.test_vocabulary import byte_level, sentence_pieces

SPACE = "\u0120"
TARGET = byte_level("t+h", "th+e", f"{SPACE}+the", "i+n", "in+g", "l+o", "lo+w", "e+r", f"{SPACE}+low")
DRAFT = sentence_pieces("\u2581", "\u2581lower", "\u2581the", "ing", "th", "lo", "w", "er", *"thelowring")


def opened(text: bytes, window: int = 8, most: int = 50, context: int = 200) -> RetokenizedSession:
    params = SessionParams(tuple(TARGET.tokens(text)), SamplingParams(temperature=0.7), most)
    return RetokenizedSession(
        DraftSession(DraftSpec(b"s" * 16, params, (), b"", TARGET.size), window), DRAFT, TARGET, context
    )


def draft(session: RetokenizedSession, text: bytes, acceptance: float = 0.5) -> None:
    for token in DRAFT.tokens(text):
        session.extend(Guess(token, 0.5, 0.5, len(session.drafted), acceptance))


def commit(session: RetokenizedSession, tokens: Sequence[int]) -> None:
    session.apply(len(session.theirs.log), tokens)


def guessed(session: RetokenizedSession) -> list[bytes]:
    return [TARGET.piece(guess.token) for guess in session.theirs.drafted]


def test_the_model_reads_the_text_in_its_own_tokens_and_its_text_becomes_the_targets() -> None:
    session = opened(b"the low")
    assert [DRAFT.piece(id) for id in session.log] == [b"th", b"e", b" ", b"lo", b"w"]
    draft(session, b"er the lower")
    assert guessed(session) == [b"er", b" the", b" low", b"er"]
    tokens, parents, survival = session.theirs.tell()
    assert (tokens, parents) == (TARGET.tokens(b"er the lower"), [])
    assert survival == [0.5, 0.25, 0.125, 0.125]  # " lower" is one of the model's tokens


def test_what_may_become_longer_is_held_back() -> None:
    session = opened(b"the")
    draft(session, b" the th")
    assert guessed(session) == [b" the"]
    draft(session, b"e low")
    assert guessed(session) == [b" the", b" the", b" low"]


def test_what_the_target_commits_in_other_tokens_is_what_was_drafted() -> None:
    session = opened(b"the")
    draft(session, b" lower the")
    log = len(session.log)
    verdict = session.apply(3 - 2, TARGET.tokens(b" low"))  # half of the model's token
    assert (verdict.standing, verdict.rejected, verdict.judged) == (session.length, False, ())
    assert len(session.log) == log and guessed(session) == [b"er"]
    commit(session, TARGET.tokens(b"er the"))
    assert [DRAFT.piece(id) for id in session.log[log:]] == [b" lower", b" the"] and not session.drafted
    assert session.recent > 0.5


def test_after_another_text_the_last_word_is_divided_anew() -> None:
    session = opened(b"the")
    commit(session, TARGET.tokens(b" low"))
    assert DRAFT.spell(session.log[-3:]) == b" low"
    draft(session, b"ing")
    verdict = session.apply(len(session.theirs.log), TARGET.tokens(b"er"))
    assert verdict.rejected and [token for _, token in verdict.judged] == [-1]
    assert DRAFT.piece(session.log[-1]) == b" lower"  # not " ", "lo", "w" and "er"
    assert verdict.standing == len(session.log) - 1


def test_no_more_is_drafted_behind_the_end_of_a_text() -> None:
    session = opened(b"the")
    draft(session, b" the" + DRAFT.piece(DRAFT.ends[0]))
    assert session.theirs.drafted[-1].token == TARGET.ends[0] and not session.wants_token


def test_a_window_counts_the_targets_tokens_and_the_last_output_token_needs_no_guess() -> None:
    session = opened(b"the", window=2)
    for text in (b" low", b" low"):
        assert session.wants_token
        draft(session, text)
    assert not session.wants_token and guessed(session) == [b" low", b" low"]
    short = opened(b"the", most=2)
    draft(short, b" the the the")
    assert len(short.theirs.drafted) == 1 and not short.wants_token
    short.theirs.resting = True
    assert short.resting


def test_a_text_longer_than_the_model_can_read_is_given_up() -> None:
    session = opened(b"the", context=12)
    with pytest.raises(CannotFollow, match="more tokens of the draft model's than its context, 12"):
        commit(session, TARGET.tokens(b"zzzzzzzzzzzzzz"))


@pytest.mark.parametrize("seed", range(20))
def test_both_sessions_spell_the_same_whatever_is_drafted_and_committed(seed: int) -> None:
    rng = random.Random(seed)
    texts = (b" the", b" low", b"er", b"ing", b"t", b" ", "é".encode(), "😀".encode(), b"\n\n", b"l", b"\xff")
    session, said = opened(b"the low"), b"the low"

    def some(most: int) -> bytes:
        return b"".join(rng.choice(texts[:-1] if rng.random() < 0.99 else texts) for _ in range(most))

    def holds(model: Vocabulary, read: Sequence[int]) -> bytes:
        return model.spell(read)

    for _ in range(60):
        draft(session, some(rng.randrange(4)), rng.random())
        ahead = holds(DRAFT, [guess.token for guess in session.drafted])
        covered = len(said) - len(holds(DRAFT, session.log))
        if rng.random() < 0.6:  # the target says a part of the draft, and perhaps something else behind it
            new = ahead[covered:][: rng.randrange(12)] + (some(1) if rng.random() < 0.5 else b"")
        else:
            new = some(rng.randrange(1, 4))
        tokens = TARGET.tokens(new)
        if rng.random() < 0.3 and new:
            tokens = [TARGET.ids[bytes([byte])] for byte in new if bytes([byte]) in TARGET.ids]
        if len(session.theirs.log) + len(tokens) > 50:
            return
        before = [*session.log, *(guess.token for guess in session.drafted)]
        verdict = session.apply(len(session.theirs.log), tokens)
        said += TARGET.spell(tokens)
        assert [*session.log, *(guess.token for guess in session.drafted)][: verdict.standing] == before[
            : verdict.standing
        ]
        if b"\xff" in said:
            continue  # no text: only that nothing fails
        read = holds(DRAFT, session.log)
        assert said.startswith(read) and TARGET.spell(session.theirs.log) == said
        ahead = holds(DRAFT, [guess.token for guess in session.drafted])
        assert ahead.startswith(said[len(read) :])
        assert (read + ahead).startswith(said + b"".join(guessed(session)))
