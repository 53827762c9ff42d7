"""What a verifier guesses itself: from a client's prediction, and of tokens that a grammar forces."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.params import SamplingParams
from outrider.wire.codec import params_from_wire, params_to_wire
from outrider.wire.guesses import OwnCounts
from outrider.wire.session import SessionParams
from verifier.draft_tree import MAX_NODES, DraftTree
from verifier.nodes import NO_NODES, Nodes
from verifier.own_guesses import Likely, Own, OwnGuesses, Prediction, counts
from verifier.running import Running
from verifier.session import DraftFate, Session, SessionSpec

TEXT = list(range(100, 300))


def steps(prediction: Sequence[int], output: Sequence[int], k: int = 8) -> tuple[int, int]:
    """Returns (steps, draft tokens that were wrong) of a target that says `output`."""
    place, log = Prediction(prediction), list[int]()
    taken = wrong = 0
    while len(log) < len(output):
        guesses, _ = place.guesses(min(k, len(output) - len(log) - 1))
        right = 0
        while right < len(guesses) and guesses[right] == output[len(log) + right]:
            right += 1
        log += output[len(log) : len(log) + right + 1]
        place.follow(log, right + 1)
        taken, wrong = taken + 1, wrong + len(guesses) - right
    return taken, wrong


def test_a_text_that_comes_as_predicted_takes_full_steps() -> None:
    taken, wrong = steps(TEXT, TEXT)
    assert (taken, wrong) == (pytest.approx(len(TEXT) / 9, abs=1), 0)


@pytest.mark.parametrize(
    ("output", "most"),
    [
        ([*TEXT[:50], 7, *TEXT[51:]], 2),  # another token
        ([*TEXT[:50], *TEXT[52:]], 2),  # less
        ([*TEXT[:50], *TEXT[110:]], 5),  # much less
        ([*TEXT[:50], 7, 8, 9, *TEXT[50:]], 7),  # more
        ([*TEXT[:50], *range(7, 37), *TEXT[50:]], 36),  # much more
        ([*TEXT[100:], *TEXT[:100]], 9),  # in another order
    ],
)
def test_after_a_difference_it_finds_its_place_again(output: list[int], most: int) -> None:
    taken, _ = steps(TEXT, output)
    assert taken <= len(output) / 9 + 1 + most


def test_a_prediction_that_is_wrong_everywhere_costs_next_to_nothing() -> None:
    rng = random.Random(1)
    output = [rng.randrange(400) for _ in range(1000)]
    for prediction in (TEXT, [rng.randrange(400) for _ in range(1000)], [output[0]] * 50):
        taken, wrong = steps(prediction, output)
        assert wrong <= 32, prediction[:3]
        assert taken <= len(output)


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=10),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_whatever_is_said_the_guesses_are_a_piece_of_the_prediction(
    prediction: list[int], turns: list[list[int]], most: int
) -> None:
    place, log = Prediction(prediction), list[int]()
    for tokens in turns:
        log += tokens
        place.follow(log, len(tokens))
        guesses, survival = place.guesses(most)
        assert len(guesses) == len(survival) <= most
        assert any(prediction[at : at + len(guesses)] == guesses for at in range(len(prediction) + 1))
        assert all(0 < chance <= 1 for chance in survival)
        assert survival == sorted(survival, reverse=True)


def test_an_output_that_was_begun_elsewhere_is_found_in_the_prediction() -> None:
    for begun in (10, 190):
        assert Prediction(TEXT, TEXT[:begun]).guesses(4)[0] == TEXT[begun : begun + 4]
    assert Prediction(TEXT, [7, *TEXT[:60]]).guesses(4)[0] == TEXT[60:64]


def asked(prediction: Sequence[int], grammar: str = "a grammar") -> SessionParams:
    return SessionParams((1, 2, 3), SamplingParams(), 20, grammar=grammar, prediction=tuple(prediction))


def forced(*tokens: int) -> Likely:
    """Returns a place where the grammar leaves no choice of these."""
    return lambda most, _: [(token, False) for token in tokens[:most]]


def test_guesses_stand_in_the_tree_and_are_bounded() -> None:
    tree, own = DraftTree(), OwnGuesses.of(asked(range(10_000)), ())
    assert own is not None
    own.add_to(tree, 4, forced(7, 8))
    assert tree.path == [0, 1, 2, 3] or tree.path == [7, 8]
    assert tree.path_of(Own.GRAMMAR) == [7, 8]
    for _ in range(3):
        own.add_to(tree, 2**20, forced(*[9] * 10_000))
        assert tree.size <= 2 * MAX_NODES
    tree = DraftTree()
    own.add_to(tree, 0, forced(7))
    assert tree.size == 0
    assert OwnGuesses.of(asked((), grammar=""), ()) is None


def test_forced_tokens_that_the_model_does_not_take_are_believed_less() -> None:
    own = OwnGuesses.of(asked(()), ())
    assert own is not None
    chances = []
    for _ in range(9):
        tree = DraftTree()
        own.add_to(tree, 4, forced(7))
        chances += tree.chances
        own.follow([1, 8], 1)
    assert chances == sorted(chances, reverse=True)
    assert len(chances) < 9 and chances[0] > 0.9  # at last none is made
    for _ in range(4):
        own.add_to(DraftTree(), 4, forced(7))
        own.follow([1, 7], 1)
    own.add_to(tree, 4, forced(7))
    assert tree.path == [7]  # what it would have guessed is a trial, too


def test_each_kind_is_counted_by_itself() -> None:
    said = {Own.PREDICTION: [1.0, 1.0, None, 1.0], Own.GRAMMAR: [0.5], "a drafter": [0.5, 0.5]}
    assert counts(said, [0, 1, 3], 2) == OwnCounts(3, 2, 1, 1)
    assert counts(said, [0, 2], 0) == OwnCounts(1, 0, 1, 0)
    assert counts({"a drafter": [0.5]}, [0], 1) == OwnCounts()
    assert OwnCounts(3, 2, 1, 1).possible(2, 3)
    for lie in (OwnCounts(4, 2), OwnCounts(3, 3), OwnCounts(3, 1), OwnCounts(0, 0, 1, 0)):
        assert not lie.possible(2, 3)


def test_a_session_s_step_tells_who_guessed_and_leads_to_the_next_guesses() -> None:
    params = SessionParams((1, 2, 3), SamplingParams(), 20, guesses=True, prediction=(7, 8, 9, 10))
    running = Running(Session(SessionSpec(b"s" * 16, params, (), 100, b""), 2), None)
    assert running.own is not None and not running.drafted
    first = running.settle(NO_NODES, [7], 0.0)
    assert first.own == OwnCounts()
    tree = running.session.tree
    assert tree.path == [8, 9]
    nodes = Nodes.path([8, 9], tree.chances, dict(tree.said))
    step = running.settle(nodes, [8, 4, 5], 0.0)
    assert (step.tokens, step.own) == ((8, 4), OwnCounts(2, 1))
    assert [guess.drafter for guess in step.guesses] == ["prediction"] * 2
    assert tree.path == [10] or tree.path == [10, *tree.path[1:]]  # 4 in the place of 9


def test_while_drafts_rest_nothing_but_its_own_guesses_stands_in_the_tree() -> None:
    params = SessionParams((1, 2, 3), SamplingParams(), 20, prediction=(7, 8, 9, 10))
    running = Running(Session(SessionSpec(b"s" * 16, params, (), 100, b""), 2), None)
    running.settle(NO_NODES, [7], 0.0)
    session = running.session
    assert session.offer(4, [50, 51, 52], (), b"", running.seats[0]) is DraftFate.TAKEN
    session.rest(True)
    assert not session.tree.size
    assert session.offer(4, [50, 51, 52], (), b"", running.seats[0]) is DraftFate.RESTING
    assert session.offer(4, [100], (), b"", running.seats[0]) is DraftFate.BAD_TOKEN  # which counts as ever
    assert running.awaited() == []
    running.settle(NO_NODES, [8], 0.0)
    assert session.tree.path == [9, 10]
    assert set(session.tree.said) == {Own.PREDICTION}
    session.rest(False)
    assert session.offer(5, [50], (), b"", running.seats[0]) is DraftFate.TAKEN


def test_a_prediction_is_kept_in_four_bytes_a_token() -> None:
    """It may be as long as the context, and needs no room in a KV pool: all sessions may have one."""
    tokens = 100_000
    text = [1000 + token for token in range(tokens)]
    message = params_to_wire(SessionParams((1, 2, 3), SamplingParams(), 20, prediction=text))
    del text
    tracemalloc.start()
    try:
        params = params_from_wire(message)
        own = OwnGuesses.of(params, ())
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert own is not None and own.prediction is not None
    assert kept <= 4 * tokens + 20_000
    assert own.prediction.guesses(2)[0] == [1000, 1001]


class Strict:
    """A place in a grammar that allows no token above a limit."""

    fault, known = None, ()

    def __init__(self, most: int) -> None:
        self.most = most
        self.busy = False

    def fits(self, path: Sequence[int]) -> int | None:
        fitting = next((index for index, token in enumerate(path) if token > self.most), len(path))
        return None if self.busy else fitting


def test_where_a_drafter_leaves_the_grammar_what_others_guess_there_is_verified() -> None:
    params = asked((7, 8, 9, 10))
    place: Any = Strict(50)
    running = Running(Session(SessionSpec(b"s" * 16, params, (), 100, b""), 4), None, place)
    session, table = running.session, running.table
    session.log += [7]
    table.blocks, table.length = [0], 3
    tree = session.tree
    tree.add([], [8, 60, 61], (), bytes([250, 249, 248]), running.seats[0])
    tree.add([], [8, 9, 70], (), bytes([200, 199, 198]), Own.PREDICTION)
    assert tree.path == [8, 60, 61]
    place.busy = True
    assert running.nodes() is NO_NODES and tree.path == [8, 60, 61]
    place.busy = False
    assert running.nodes().tokens == [8, 9] == tree.path
    tree.add([], [80, 1], (), bytes([255, 255]), running.seats[0])
    assert running.nodes().tokens == [8, 9]
