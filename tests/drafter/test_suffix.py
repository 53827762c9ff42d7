"""Guesses that are looked up in the text so far."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.session import DraftSession, DraftSpec
from drafter.suffix import MOST_GUESSES, SuffixProposer
from drafter.text_index import SHORTEST
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams

ROOT = Path(__file__).resolve().parents[2]


class Heard:
    """What a link would hear."""

    def __init__(self) -> None:
        self.changed: list[bytes] = []
        self.failed: list[str] = []

    def on_change(self, changed: Sequence[DraftSession]) -> None:
        self.changed += [session.id for session in changed]

    def on_failed(self, session: DraftSession, reason: str) -> None:
        self.failed.append(reason)


def proposing(heard: Heard | None = None, answers_bytes: int = 0) -> SuffixProposer:
    heard = heard or Heard()
    return SuffixProposer(heard.on_change, heard.on_failed, lambda: 0.0, answers_bytes)


def opened(
    proposer: SuffixProposer,
    prompt: Sequence[int],
    window: int = 4,
    most: int = 50,
    name: bytes = b"s",
    salt: bytes = b"",
    target: str = "",
    vocab_size: int = 100,
) -> DraftSession:
    params = SessionParams(tuple(prompt), SamplingParams(temperature=0.0), most, cache_salt=salt)
    spec = DraftSpec(name * 16, params, (), b"", vocab_size, target)
    session = DraftSession(spec, window)
    proposer.open(session)
    return session


def drafted(session: DraftSession) -> list[int]:
    return [guess.token for guess in session.drafted]


def test_what_followed_the_same_tokens_is_guessed() -> None:
    assert drafted(opened(proposing(), [1, 2, 3, 4, 5, 9, 1, 2])) == [3, 4, 5, 9]


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert drafted(opened(proposing(), [7, 8, 7, 8], window=7)) == [7, 8, 7, 8, 7, 8, 7]


def test_what_followed_most_often_is_guessed() -> None:
    assert drafted(opened(proposing(), [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], window=1)) == [3]


def test_a_longer_match_counts_more_than_several_short_ones() -> None:
    text = [5, 6, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 4, 7, 5, 6, 1, 2]
    assert drafted(opened(proposing(), text, window=1)) == [3]


ANSWER = list(range(20, 40))


def remembering(answers_bytes: int = 2**20) -> SuffixProposer:
    """One that has seen an answer of alice's."""
    proposer = proposing(answers_bytes=answers_bytes)
    session = opened(proposer, [1, 2], name=b"a", salt=b"alice", target="m")
    proposer.commit(session, 2, ANSWER)
    proposer.close(session.id)
    return proposer


def test_finished_answers_are_looked_up_if_that_was_asked_for() -> None:
    asked = [50, *ANSWER[:4]]
    assert drafted(opened(remembering(), asked, salt=b"alice", target="m")) == ANSWER[4:8]
    assert drafted(opened(remembering(0), asked, salt=b"alice", target="m")) == []
    end = opened(remembering(), ANSWER[-5:-1], salt=b"alice", target="m")
    assert drafted(end) == ANSWER[-1:]  # behind it another answer may stand


def test_nobody_is_told_another_s_answers_or_those_of_another_model() -> None:
    for salt, target in ((b"bob", "m"), (b"", "m"), (b"alice", "other")):
        assert drafted(opened(remembering(), ANSWER[:4], salt=salt, target=target)) == []


def test_no_token_is_guessed_that_the_target_has_not() -> None:
    proposer = remembering()
    session = opened(proposer, ANSWER[:4], salt=b"alice", target="m", vocab_size=ANSWER[6])
    assert drafted(session) == ANSWER[4:6]


def test_a_log_that_contradicts_itself_is_not_remembered() -> None:
    proposer = proposing(answers_bytes=2**20)
    session = opened(proposer, [1, 2], name=b"a")
    proposer.commit(session, 2, ANSWER)
    proposer.commit(session, 2, [99])
    assert drafted(opened(proposer, ANSWER[:4])) == []


def test_new_text_is_not_guessed_and_its_commits_are_acknowledged() -> None:
    heard = Heard()
    proposer = proposing(heard)
    session = opened(proposer, [1, 2, 3])
    proposer.commit(session, 3, [4, 5])
    assert drafted(session) == []
    assert session.log == [1, 2, 3, 4, 5]
    assert heard.changed == [b"s" * 16]


def test_guesses_go_on_where_they_were_right_and_begin_anew_where_they_were_wrong() -> None:
    proposer = proposing()
    session = opened(proposer, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    proposer.commit(session, 10, [3, 4])
    assert drafted(session) == [5, 6, 7, 8]
    proposer.commit(session, 12, [5, 1, 2])
    assert drafted(session) == [3, 4, 5, 1]  # as it went on the last time
    assert proposer.load.rejections == 1


def test_the_window_and_the_last_token_bound_the_guesses() -> None:
    proposer = proposing()
    session = opened(proposer, [1, 2] * 4, window=0, most=6)
    assert drafted(session) == []
    proposer.set_window(session.id, 3)
    assert len(drafted(session)) == 3
    proposer.set_window(session.id, 2**32 - 1)
    assert len(drafted(session)) == 5  # the last token is always the target's own
    long = opened(proposer, [1, 2] * 4, window=2**32 - 1, most=10_000)
    assert len(drafted(long)) == MOST_GUESSES


def test_survival_follows_what_the_target_takes() -> None:
    right, wrong = proposing(), proposing()
    good, bad = opened(right, [1, 2, 3, 1, 2], most=900), opened(wrong, [1, 2, 3, 1, 2], most=900)
    for turn in range(100):
        right.commit(good, len(good.log), [3, 1, 2])
        wrong.commit(bad, len(bad.log), [10 + turn % 80, 1, 2])
    assert good.drafted[0].acceptance > 0.9
    assert bad.drafted[0].acceptance < 0.3


def test_how_an_output_begins_is_learned_apart() -> None:
    """In a chat the template before an answer has been before, but the answer is another; within it what was
    said before is said again."""
    proposer = proposing()
    template, said = [90, 91, 92, 93], [7, 1, 2, 3, 4, 5, 6]
    for turn in range(8):
        chat = opened(proposer, [*template, *said, *template], most=900, name=b"%c" % turn)
        for tokens in ([7], [20 + turn, 1, 2], [3, 4, 5, 6]):
            proposer.commit(chat, len(chat.log), tokens)
        proposer.close(chat.id)
    chat = opened(proposer, [*template, *said, *template], most=900)
    assert drafted(chat) == [7, 1, 2, 3]
    assert chat.drafted[0].acceptance > 0.9
    assert chat.drafted[1].acceptance < 0.3
    assert chat.drafted[2].acceptance > 0.9  # if it does begin so, it goes on
    proposer.commit(chat, len(chat.log), [7, 50, 1, 2])
    assert drafted(chat) == [3, 4, 5, 6]
    assert chat.survival > 0.6


def test_a_session_without_a_window_is_learned_from() -> None:
    proposer = proposing()
    session = opened(proposer, [1, 2, 3, 1, 2, 3], window=0, most=900)
    before = session.recent
    for token in [1, 2, 3] * 5:
        proposer.commit(session, len(session.log), [token])
    assert session.recent > before


def test_a_log_that_contradicts_itself_ends_the_session() -> None:
    heard = Heard()
    proposer = proposing(heard)
    session = opened(proposer, [1, 2, 3])
    proposer.commit(session, 2, [9])
    assert heard.failed == ["the commit at position 2 contradicts the log"]
    assert proposer.load.sessions == 0
    proposer.commit(session, 3, [9])  # still on its way when the session was over
    assert session.log == [1, 2, 3]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 4), max_size=3)), max_size=12),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_every_guess_once_followed_the_tokens_before_it(
    prompt: list[int], turns: list[tuple[int, list[int]]], window: int
) -> None:
    """Whatever is committed, and however much of it had been guessed."""
    proposer = proposing()
    session = opened(proposer, prompt, window, most=200)
    for agreed, others in turns:
        proposer.commit(session, len(session.log), [*drafted(session)[:agreed], *others])
        text = [*session.log, *drafted(session)]
        assert len(session.drafted) <= window
        for at in range(len(session.log), len(text)):
            before = text[at - SHORTEST : at + 1]
            assert any(text[i - SHORTEST : i + 1] == before for i in range(SHORTEST, at))


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys; import drafter.service, drafter.suffix, outrider_cli; "
        "drafter.suffix.suffix_source(); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "False"], said.stderr
