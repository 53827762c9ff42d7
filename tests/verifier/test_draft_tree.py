"""The tree of guesses beyond a log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verifier.draft_tree import MAX_NODES, DraftTree

tokens = st.integers(0, 3)


def test_a_chain_is_verified_in_order() -> None:
    tree = DraftTree()
    assert tree.add([], [1, 2, 3], [], b"") == 3
    assert tree.best_path(2) == [1, 2]


def test_the_overtaken_part_of_a_draft_must_match_and_its_rest_counts() -> None:
    tree = DraftTree()
    assert tree.add([1, 2], [1, 2, 3], [], b"") == 1
    assert tree.best_path(9) == [3]
    assert tree.add([1, 2], [1, 9, 4], [], b"") == 0
    assert tree.best_path(9) == [3]


def test_a_repeated_draft_adds_nothing() -> None:
    tree = DraftTree()
    tree.add([], [1, 2], [], b"")
    assert tree.add([], [1, 2], [], b"") == 0
    assert tree.size == 2


def test_of_two_guesses_the_likelier_is_verified_and_of_equals_the_later() -> None:
    tree = DraftTree()
    tree.add([], [1], [], b"")
    tree.add([], [2], [], b"")
    assert tree.best_path(1) == [2]
    tree.add([], [3, 4], [-1, -1], bytes([10, 200]))
    tree.add([], [1, 2], [-1, -1], bytes([20, 30]))
    assert tree.best_path(1) == [4]


def test_a_commit_keeps_the_subtree_below_it() -> None:
    tree = DraftTree()
    tree.add([], [1, 2, 3, 7], [-1, 0, 0, 2], b"")  # 1 -> 2, 1 -> 3 -> 7
    tree.advance([1, 3])
    assert tree.best_path(9) == [7]
    assert tree.size == 1
    tree.advance([8])
    assert tree.best_path(9) == []
    assert tree.size == 0


def test_the_tree_is_bounded() -> None:
    tree = DraftTree()
    tree.add([], list(range(2 * MAX_NODES)), [-1] * 2 * MAX_NODES, b"")
    assert tree.size == MAX_NODES


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Overtaken tokens, and a tree in topological order."""
    chosen = draw(st.lists(tokens, min_size=1, max_size=8))
    parents = [draw(st.integers(-1, index - 1)) for index in range(len(chosen))]
    return draw(st.lists(tokens, max_size=3)), chosen, parents


@given(drafts())
def test_exactly_the_paths_that_match_what_was_overtaken_survive(
    draft: tuple[list[int], list[int], list[int]],
) -> None:
    overtaken, chosen, parents = draft
    paths = set()
    for index in range(len(chosen)):
        path, at = [], index
        while at >= 0:
            path.append(chosen[at])
            at = parents[at]
        path.reverse()
        if path[: len(overtaken)] == overtaken and len(path) > len(overtaken):
            paths.add(tuple(path[len(overtaken) :]))
    tree = DraftTree()
    assert tree.add(overtaken, chosen, parents, b"") == tree.size == len(paths)
    best = tuple(tree.best_path(99))
    assert not paths or best in paths
