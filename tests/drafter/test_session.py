"""What a commit does to a draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drafter.session import (
    MOST_WITH_OTHERS,
    Alternative,
    Branch,
    DraftSession,
    DraftSpec,
    Guess,
    LogConflict,
)
from drafter.survival import on_the_wire
from outrider.engine.kv_blocks import BlockTable
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from verifier.draft_tree import DraftTree


def guess(token: int, acceptance: float = 0.5, *others: int) -> Guess:
    """One whose alternatives are each the target's token in half of the cases."""
    alternatives = tuple(Alternative(other, 0.5, 0.5) for other in others)
    return Guess(token, 0.5, 0.5, 0, acceptance, alternatives)


def drafting(tokens: list[int], *, window: int = 8, max_tokens: int = 20) -> DraftSession:
    session = DraftSession(
        DraftSpec(b"s" * 16, SessionParams((1, 2, 3), SamplingParams(), max_tokens), (), b"", 100), window
    )
    for token in tokens:
        session.extend(guess(token, 0.5, token + 40, token + 50))
    return session


def branch(session: DraftSession, at: int, rank: int, *tokens: int) -> Branch:
    alternative = session.drafted[at - len(session.log)].alternatives[rank]
    new = Branch(at, rank, alternative.token, BlockTable())
    session.branches.append(new)
    for token in tokens:
        session.extend(guess(token), new)
    return new


def drafted(session: DraftSession) -> list[int]:
    return [guess.token for guess in session.drafted]


def test_what_the_target_confirmed_stays_and_drafting_goes_on_from_there() -> None:
    s = drafting([10, 11, 12])
    verdict = s.apply(3, [10, 11])
    assert (verdict.standing, verdict.rejected, verdict.adopted) == (6, False, None)
    assert (s.log, drafted(s), s.scored) == ([1, 2, 3, 10, 11], [12], 5)


def test_at_the_first_difference_the_rest_of_the_draft_goes() -> None:
    s = drafting([10, 11, 12])
    verdict = s.apply(3, [10, 77])
    assert (verdict.standing, verdict.rejected) == (4, True)
    assert [(guess.token, token) for guess, token in verdict.judged] == [(10, 10), (11, 77)]
    assert (s.log, drafted(s), s.scored) == ([1, 2, 3, 10, 77], [], 5)


def test_a_commit_longer_than_the_draft_leaves_positions_to_be_scored_later() -> None:
    s = drafting([10])
    verdict = s.apply(3, [10, 11])
    assert (verdict.standing, verdict.rejected, len(verdict.judged)) == (4, False, 1)
    assert (s.log, drafted(s), s.scored) == ([1, 2, 3, 10, 11], [], 4)


def test_a_repeated_commit_changes_nothing() -> None:
    s = drafting([10, 11, 12])
    kept = branch(s, 5, 0, 60)
    s.apply(3, [10])
    recent = s.recent
    verdict = s.apply(3, [10])
    assert (verdict.standing, verdict.judged, verdict.dropped) == (6, (), ())
    assert (s.log, drafted(s), s.branches, s.recent) == ([1, 2, 3, 10], [11, 12], [kept], recent)


def test_a_commit_beyond_the_log_waits_for_the_one_that_was_lost() -> None:
    s = drafting([10, 11])
    assert s.apply(4, [11]).standing == 5
    assert (s.log, drafted(s)) == ([1, 2, 3], [10, 11])


def test_a_commit_that_contradicts_the_log_is_an_error() -> None:
    s = drafting([])
    s.apply(3, [10])
    with pytest.raises(LogConflict, match="position 3"):
        s.apply(3, [11])


def test_the_branch_that_has_the_targets_token_takes_the_trunks_place() -> None:
    s = drafting([10, 11, 12])
    early, right, wrong = branch(s, 3, 0, 60), branch(s, 4, 1, 70, 71), branch(s, 4, 0, 80)
    verdict = s.apply(3, [10, 61])  # 61 is what the second of 11's alternatives says
    assert (verdict.adopted, verdict.dropped, verdict.standing) == (right, (early, wrong), 7)
    assert (s.log, drafted(s), s.branches) == ([1, 2, 3, 10, 61], [70, 71], [])


@pytest.mark.parametrize(
    ("tokens", "standing", "left", "scored"),
    [
        ([10, 61, 70], 7, [71], 6),  # its first guess is confirmed, too
        ([10, 61, 70, 71, 9], 7, [], 7),  # all of it, and a token that nobody guessed
        ([10, 61, 70, 9, 9], 6, [], 7),  # its second guess was wrong
        ([10, 61, 9], 5, [], 6),  # its first was
    ],
)
def test_a_commit_goes_on_along_the_branch(
    tokens: list[int], standing: int, left: list[int], scored: int
) -> None:
    s = drafting([10, 11, 12])
    branch(s, 4, 1, 70, 71)
    verdict = s.apply(3, tokens)
    assert (verdict.standing, drafted(s), s.scored) == (standing, left, scored)
    assert len(verdict.judged) == scored - 3


def test_branches_beyond_the_new_end_of_the_log_stay_and_others_go() -> None:
    s = drafting([10, 11, 12])
    passed, ahead = branch(s, 4, 0, 60), branch(s, 5, 0, 70)
    assert s.apply(3, [10, 11]).dropped == (passed,)
    assert s.branches == [ahead]


def test_the_tree_has_the_trunk_first_and_the_chance_that_the_target_goes_there() -> None:
    s = drafting([10, 11, 12])
    branch(s, 3, 0, 60)
    branch(s, 5, 1, 70, 71)
    tokens, parents, survival = s.tell()
    assert tokens == [10, 11, 12, 50, 60, 62, 70, 71]
    assert parents == [-1, 0, 1, -1, 3, 1, 5, 6]
    assert survival == [0.5, 0.25, 0.125, 0.25, 0.125, 0.0625, 0.03125, 0.015625]


def test_only_paths_with_something_new_are_told_each_from_the_logs_end_on() -> None:
    s = drafting([10, 11, 12])
    assert s.tell() == ([10, 11, 12], [], [0.5, 0.25, 0.125])
    early, late = branch(s, 4, 0, 60), branch(s, 5, 0, 70)
    assert s.tell()[:2] == ([10, 11, 51, 60, 52, 70], [-1, 0, 0, 2, 1, 4])
    assert not s.untold_yet
    s.extend(guess(61), early)
    assert s.tell()[:2] == ([10, 51, 60, 61], [-1, 0, 1, 2])
    s.apply(3, [10, 11])
    assert s.tell() == ([], [], [])  # the verifier knows what is left: it hears how far the log is known here
    s.extend(guess(71), late)
    s.apply(5, [52])  # the second guess of the branch that is the trunk now has not been told
    assert s.tell()[0] == [70, 71]


def test_what_may_stand_in_the_place_of_a_guess_is_told_with_it_where_the_verifier_wants_it() -> None:
    """But where a branch begins that is told already, or is about to be."""
    s = drafting([10, 11])
    s.beside = 0.25
    tokens, parents, survival = s.tell()
    assert (tokens, parents) == ([10, 11, 50, 60, 51, 61], [-1, 0, -1, -1, 0, 0])
    assert survival == [0.5, 0.25, 0.25, 0.25, 0.125, 0.125]
    s.extend(guess(12, 0.5, 52, 62))
    new = branch(s, 5, 1, 70)
    s.drafted[-1] = guess(12, 0.5, 52, 62)
    assert s.tell()[:2] == ([10, 11, 12, 62, 70, 52], [-1, 0, 1, 1, 3, 1])
    s.extend(guess(71, 0.5, 81), new)
    assert s.tell()[:2] == ([10, 11, 62, 70, 81, 71], [-1, 0, 1, 2, 3, 3])
    s.beside = 0.26
    s.tell_anew()
    assert s.tell()[0] == [10, 11, 12, 62, 70, 71], "none of them is likely enough"
    long = drafting(list(range(10, 60)), window=60, max_tokens=200)
    long.beside = 0.01
    assert len(long.tell()[0]) == MOST_WITH_OTHERS


def test_however_unlikely_the_trunk_is_it_counts_as_likelier_than_what_stands_beside_it() -> None:
    s, tree = drafting([], window=12), DraftTree()
    s.beside = 0.01
    for token in range(10, 20):
        s.extend(guess(token, 0.4, token + 40))
    tokens, parents, survival = s.tell()
    assert round(255 * 0.4**8) == 0 and 58 in tokens
    tree.add([], tokens, parents, on_the_wire(survival))
    s.apply(3, tokens[:8])
    tree.advance(tokens[:8])
    s.extend(guess(20, 0.4, 60))
    tokens, parents, survival = s.tell()  # of what was told before the trunk alone, as it counts now
    tree.add([], tokens, parents, on_the_wire(survival))
    assert tree.path == [18, 19, 20]


@pytest.mark.parametrize("anew", [DraftSession.tell_anew, lambda s: s.apply(3, [])], ids=["link", "verifier"])
def test_a_verifier_that_may_know_nothing_is_told_everything(anew: Callable[[DraftSession], object]) -> None:
    """After the stream broke; and when it says that it has just learned of us."""
    s = drafting([10, 11, 12])
    branch(s, 4, 0, 60)
    told = s.tell()
    anew(s)
    assert s.tell() == told and len(told[0]) == 5


def test_the_first_guesses_are_told_one_by_one_and_later_ones_together() -> None:
    s, told = drafting([], window=14), []
    for token in range(14):
        s.extend(guess(token))
        if s.worth_telling:
            told.append(len(s.drafted))
            s.tell()
    assert told == [1, 2, 4, 7, 11, 14]  # the last: no more to come


def test_after_a_commit_they_are_told_one_by_one_again_however_many_stand() -> None:
    s = drafting([10, 11, 12, 13, 14, 15], window=14)
    s.tell()
    s.extend(guess(16))
    assert not s.worth_telling
    s.apply(3, [10])
    assert s.worth_telling  # what was held back
    s.tell()
    told = []
    for token in (17, 18, 19):
        s.extend(guess(token))
        told.append(s.worth_telling)
        if told[-1]:
            s.tell()
    assert told == [True, False, True]


def test_a_commit_is_acknowledged_with_the_guess_that_follows_it() -> None:
    s = drafting([10, 11], window=2)
    s.tell()
    s.apply(3, [10, 11, 12])
    assert not s.worth_telling  # the window is open again: a guess will come in the next step
    s.extend(guess(13))
    assert s.worth_telling
    s.tell()
    s.window = 0
    s.apply(6, [13])
    assert s.worth_telling  # nothing will follow


def test_no_draft_goes_past_the_window_or_the_last_token_that_needs_one() -> None:
    assert not drafting([10, 11], window=2).wants_token
    assert drafting([10], window=2).wants_token
    assert drafting([], max_tokens=2).wants_token
    assert not drafting([10], max_tokens=2).wants_token  # the second output token is the target's own


def test_the_tokens_to_catch_up_on() -> None:
    s = drafting([10, 11])
    assert s.uncached(0) == [1, 2, 3, 10, 11]
    assert s.uncached(2) == [3, 10, 11]
    assert s.uncached(4) == [11]
