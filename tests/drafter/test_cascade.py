"""What a look-up expects next in a session's text, and how much of it is worth a row."""

from __future__ import annotations

import random
from pathlib import Path

from drafter.cascade import MOST_CHECKED
from drafter.drafting import Drafting
from drafter.look_up import LookUp
from drafter.session import DraftSession, DraftSpec, Guess
from outrider.engine.loading import load_engine
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from tests.drafter.test_stepper import Heard, commit, count_steps, running, spec, tables, tokens, until
from tests.tiny_models import build

TEXT = list(range(10, 60))


def session(prompt: list[int]) -> DraftSession:
    params = SessionParams(tuple(prompt), SamplingParams(), 200)
    return DraftSession(DraftSpec(b"s" * 16, params, (), b"", 199), 16)


def drafted(one: DraftSession, *tokens: int) -> None:
    for token in tokens:
        one.extend(Guess(token, 0.9, 0.5, len(one.drafted), 0.9))


def test_the_more_the_model_agrees_the_more_it_checks() -> None:
    one = session([*TEXT, 1, *TEXT[:10]])
    look_up, most = LookUp(one), 0
    for _ in range(12):
        expected = look_up.expects(MOST_CHECKED)
        assert expected == TEXT[10 : 10 + len(expected)] and len(expected) >= most
        most = len(expected)
        look_up.judge([*expected, 7], most)
    assert most == MOST_CHECKED
    assert look_up.expects(3) == TEXT[10:13]


def test_one_that_does_not_agree_checks_nothing_until_it_would_have_agreed_again() -> None:
    look_up = LookUp(session([*TEXT, 1, *TEXT[:10]]))
    rows = 0
    for _ in range(100):
        expected = look_up.expects(MOST_CHECKED)
        rows += len(expected)
        look_up.judge([7], len(expected))
    assert rows < 20 and look_up.expects(MOST_CHECKED) == []
    for _ in range(20):  # what it would have been told is right
        expected = look_up.expects(MOST_CHECKED)
        look_up.judge([*expected, 7] if expected else [TEXT[10]], len(expected))
    assert len(look_up.expects(MOST_CHECKED)) > 3


def test_it_goes_on_behind_what_is_drafted_and_into_it() -> None:
    one = session([1, 2, 3, 4, 1, 2])
    drafted(one, 3, 4, 1, 2, 3, 4)
    look_up = LookUp(one)
    look_up._rate = 1.0
    assert look_up.expects(7) == [1, 2, 3, 4, 1, 2, 3]
    one.apply(6, [3, 4, 9, 1, 2, 3])
    assert look_up.expects(2) == [4, 9]


def test_a_text_that_never_repeats_itself_expects_nothing() -> None:
    look_up = LookUp(session(TEXT))
    assert look_up.expects(MOST_CHECKED) == []
    look_up.judge([7], 0)
    assert look_up.expects(MOST_CHECKED) == []


async def test_what_it_drafts_is_what_it_would_have_drafted_token_by_token(tmp_path: Path) -> None:
    """Of a text of two tokens most is expected rightly, and much is not: the cache keeps what was right."""
    model = build("llama", tmp_path)
    engine = load_engine(str(model), name="draft", kv_memory_bytes=8 * 2**20, threads=1)
    sampling = SamplingParams(temperature=1.0, logit_bias={7: 30.0, 8: 30.0}, seed=3)
    rng, output = random.Random(2), tuple[int, ...]()
    prompt = tuple(rng.choice((7, 8)) for _ in range(60))
    async with running(engine, Heard(), branches=False) as stepper:
        steps = count_steps(engine)

        async def drafts(cascade: bool, number: int) -> tuple[list[int], int, Drafting]:
            stepper._cascade = cascade
            before = len(steps)
            drafting = stepper.open(DraftSession(spec(number, output, sampling, prompt=prompt), 40))
            await until(lambda: not drafting.session.wants_token)
            return tokens(drafting), len(steps) - before, drafting

        for number in range(4):
            expected, alone, one = await drafts(False, 2 * number)
            stepper.close(one.id)
            found, checked, other = await drafts(True, 2 * number + 1)
            assert found == expected
            assert checked < 0.9 * alone
            engine.pool.check_integrity(tables(other))  # type: ignore[arg-type]
            wrong = rng.randrange(3, 20)
            await commit(stepper, other, [*found[:wrong], 15 - found[wrong]])  # the other of the two tokens
            await until(lambda session=other.session: not session.wants_token)
            output = tuple(other.session.log[60:])
            after, _, again = await drafts(False, 20 + number)
            assert tokens(other) == after
            for each in (other, again):
                stepper.close(each.id)
