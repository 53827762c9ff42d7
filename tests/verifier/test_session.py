"""A session's log: what a step commits, when it ends, which drafts are refused."""

from __future__ import annotations

import pytest

from outrider.sampling.params import SamplingParams
from outrider.wire.session import FinishReason, SessionParams
from verifier.nodes import Nodes
from verifier.session import DraftFate, Session, SessionSpec


def session(*, max_tokens: int = 10, stop: frozenset[int] = frozenset(), k: int = 4) -> Session:
    spec = SessionSpec(b"s" * 16, SessionParams((1, 2, 3), SamplingParams(), max_tokens, stop), (), 100, b"")
    return Session(spec, k)


def path(tokens: list[int]) -> Nodes:
    return Nodes.path(tokens, [1.0] * len(tokens), {})


def test_the_path_is_accepted_up_to_the_first_difference() -> None:
    s = session()
    outcome = s.verify(path([10, 11, 12]), [10, 11, 99, 50])
    assert (outcome.base, outcome.tokens, outcome.accepted, outcome.verified) == (3, (10, 11, 99), 2, 3)
    assert s.log == [1, 2, 3, 10, 11, 99]


def test_of_a_tree_the_nodes_are_accepted_that_the_target_takes_one_behind_the_other() -> None:
    tree = Nodes([10, 11, 20, 21, 22], [1.0] * 5, [-1, 0, -1, 2, 2], {})
    s = session()
    outcome = s.verify(tree, [20, 77, 78, 22, 79, 30])
    assert (outcome.tokens, outcome.accepted, outcome.followed) == ((20, 22, 30), 2, (2, 4))
    assert (outcome.verified, outcome.beside) == (2, 3), "nothing stood behind what was accepted"
    outcome = session().verify(tree, [20, 77, 78, 9, 79, 30])
    assert (outcome.tokens, outcome.accepted, outcome.verified) == ((20, 9), 1, 2)
    outcome = session().verify(tree, [10, 11, 12, 9, 79, 30])
    assert (outcome.tokens, outcome.accepted, outcome.verified, outcome.beside) == ((10, 11, 12), 2, 2, 3)
    outcome = session().verify(tree, [5, 11, 12, 9, 79, 30])
    assert (outcome.tokens, outcome.accepted, outcome.verified, outcome.beside) == ((5,), 0, 2, 3)
    outcome = session(max_tokens=2).verify(tree, [20, 77, 78, 22, 79, 30])
    assert (outcome.tokens, outcome.followed) == ((20, 22), (2, 4))


def test_what_follows_a_row_without_a_mask_is_not_accepted() -> None:
    tree = Nodes([10, 11, 20], [1.0] * 3, [-1, 0, -1], {})
    outcome = session().verify(tree, [10, 11, 12, 13], [True, False, False, True])
    assert (outcome.tokens, outcome.accepted, outcome.verified, outcome.beside) == ((10,), 0, 0, 1)
    outcome = session().verify(tree, [20, 11, 12, 13], [True, False, False, True])
    assert (outcome.tokens, outcome.accepted) == ((20, 13), 1)


def test_the_bonus_token_follows_a_path_that_was_accepted_whole() -> None:
    outcome = session().verify(path([10, 11]), [10, 11, 12])
    assert (outcome.tokens, outcome.accepted) == ((10, 11, 12), 2)


def test_a_stop_token_ends_the_session_even_amid_accepted_drafts() -> None:
    outcome = session(stop=frozenset({11})).verify(path([10, 11, 12]), [10, 11, 12, 13])
    assert (outcome.tokens, outcome.accepted, outcome.finish) == ((10, 11), 2, FinishReason.STOP)


def test_max_tokens_ends_the_session() -> None:
    s = session(max_tokens=2)
    assert s.verify(path([]), [10]).finish is None
    assert s.verify(path([]), [11]).finish is FinishReason.LENGTH


def test_a_stop_token_as_the_last_one_allowed_is_a_stop() -> None:
    assert session(max_tokens=1, stop=(10,)).verify(path([]), [10]).finish is FinishReason.STOP


def test_no_more_is_verified_than_can_be_committed() -> None:
    s = session(max_tokens=3)
    s.offer(3, [10, 11, 12, 13], [], b"")
    assert s.nodes().tokens == [10, 11]


def test_nothing_behind_a_token_that_ends_the_session_is_verified() -> None:
    s = session(stop=frozenset({11}))
    s.offer(3, [10, 11, 12, 13], [], b"")
    assert s.nodes().tokens == [10, 11]
    s.offer(3, [10, 20], [], b"")
    assert s.nodes().tokens == [10, 20], "guesses that do not end it are verified as ever"
    s = session(stop=frozenset({11}))
    s.offer(3, [10, 11, 12, 13, 14], [-1, 0, 1, 1, 0], bytes([240, 220, 110, 100, 15]))
    assert s.nodes(0.01).tokens == [10, 11, 14]


@pytest.mark.parametrize(
    ("base", "tokens", "parents", "survival", "fate"),
    [
        (3, [10], [], b"", DraftFate.TAKEN),
        (4, [10], [], b"", DraftFate.AHEAD),
        (1000, [10], [], b"", DraftFate.BEYOND),
        (2, [3, 10], [], b"", DraftFate.BEFORE_OUTPUT),
        (3, [100], [], b"", DraftFate.BAD_TOKEN),
        (3, [10, 11], [0], b"", DraftFate.BAD_TREE),
        (3, [10, 11], [-1, 1], b"", DraftFate.BAD_TREE),
        (3, [10, 11], [-2, 0], b"", DraftFate.BAD_TREE),
        (3, [10, 11], [], b"x", DraftFate.BAD_TREE),
        (3, [], [], b"", DraftFate.STALE),
        (3, [10] * 1000, [], b"", DraftFate.TOO_LONG),
    ],
)
def test_what_becomes_of_a_draft(
    base: int, tokens: list[int], parents: list[int], survival: bytes, fate: DraftFate
) -> None:
    s = session()
    assert s.offer(base, tokens, parents, survival) is fate
    assert s.nodes().tokens == (tokens if fate is DraftFate.TAKEN else [])


def test_a_draft_that_was_overtaken_counts_where_it_agrees() -> None:
    s = session()
    s.verify(path([]), [10])
    assert s.offer(3, [10, 11], [], b"") is DraftFate.TAKEN
    assert s.offer(3, [9, 12], [], b"") is DraftFate.STALE
    assert s.offer(3, [10], [], b"") is DraftFate.STALE
    assert s.nodes().tokens == [11]
