"""The tree of guesses beyond a log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.draft_tree import MAX_NODES, DraftTree, Fixed

tokens = st.integers(0, 3)


def best(tree: DraftTree) -> list[int]:
    return tree.path


def chances(tree: DraftTree) -> list[float]:
    return tree.chances


def test_a_chain_is_verified_in_order() -> None:
    tree = DraftTree()
    assert tree.add([], [1, 2, 3], [], b"") == 3
    assert best(tree) == [1, 2, 3]


def test_the_overtaken_part_of_a_draft_must_match_and_its_rest_counts() -> None:
    tree = DraftTree()
    assert tree.add([1, 2], [1, 2, 3], [], b"") == 1
    assert best(tree) == [3]
    assert tree.add([1, 2], [1, 9, 4], [], b"") == 0
    assert best(tree) == [3]


def test_a_repeated_draft_adds_nothing() -> None:
    tree = DraftTree()
    tree.add([], [1, 2], [], b"")
    assert tree.add([], [1, 2], [], b"") == 0
    assert tree.size == 2


def test_of_two_guesses_the_likelier_is_verified_and_of_equals_the_later() -> None:
    tree = DraftTree()
    tree.add([], [1], [], b"")
    tree.add([], [2], [], b"")
    assert best(tree) == [2]
    tree.add([], [3, 4], [-1, -1], bytes([10, 200]))
    tree.add([], [1, 2], [-1, -1], bytes([20, 30]))
    assert best(tree) == [4]


def test_nodes_come_by_survival_the_path_whole_and_what_is_beside_it_from_some_survival_on() -> None:
    tree = DraftTree()
    #   1 -> 2 -> 3 is the path; 7 and 8 stand in the place of 1, 9 in that of 2, and 4 behind 9
    tree.add([], [1, 2, 3, 7, 8, 9, 4], [-1, 0, 1, -1, -1, 0, 5], bytes([127, 90, 9, 60, 30, 30, 20]))
    nodes = tree.nodes(tree.chances, 4, 0.05)
    assert nodes.tokens == [1, 2, 7, 8, 9, 4, 3]
    assert list(nodes.parents) == [-1, 0, -1, -1, 0, 4, 1]
    assert nodes.survival == sorted(nodes.survival, reverse=True) and nodes.survival[-1] < 0.05
    assert nodes.depths == [0, 1, 0, 0, 1, 2, 2] and nodes.paths[5] == [1, 9, 4]
    assert tree.nodes(tree.chances, 4, 0.2).tokens == [1, 2, 7, 3]
    assert tree.nodes(tree.chances[:1], 1, 0.05).tokens == [1, 7, 8]
    assert tree.nodes(tree.chances, 4, 2.0).tokens == [1, 2, 3]
    chained = nodes.in_chains()
    assert chained.tokens == [1, 2, 3, 7, 8, 9, 4] and list(chained.parents) == [-1, 0, 1, -1, -1, 0, 5]
    assert chained.chains == [(0, 3), (3, 4), (4, 5), (5, 7)]
    assert sorted(zip(chained.tokens, chained.said[None], strict=True)) == sorted(
        zip(nodes.tokens, nodes.said[None], strict=True)
    )


def test_of_tokens_at_one_place_one_at_most_is_right_whatever_is_said() -> None:
    tree = DraftTree()
    tree.add([], [1, 2, 3, 4], [-1] * 4, bytes([200, 199, 198, 197]))
    assert sum(tree.nodes(tree.chances, 4, 0.0).chances) == pytest.approx(1)
    tree.believe({None: Fixed((0.5,), 0.1)})
    assert tree.nodes(tree.chances, 4, 0.0).chances == pytest.approx([0.39, 0.078, 0.078, 0.077], abs=0.01)


def test_a_commit_keeps_the_subtree_below_it() -> None:
    tree = DraftTree()
    tree.add([], [1, 2, 3, 7], [-1, 0, 0, 2], b"")  # 1 -> 2, 1 -> 3 -> 7
    tree.advance([1, 3])
    assert best(tree) == [7]
    assert tree.size == 1
    tree.advance([8])
    assert best(tree) == []
    assert tree.size == 0


def test_the_tree_is_bounded() -> None:
    tree = DraftTree()
    tree.add([], list(range(2 * MAX_NODES)), [-1] * 2 * MAX_NODES, b"")
    assert tree.size == MAX_NODES


def test_a_fork_is_decided_again_as_soon_as_a_draft_thinks_otherwise() -> None:
    tree = DraftTree()
    tree.add([], [1, 2, 3], [], bytes([200, 190, 180]))
    tree.add([], [4], [], bytes([50]))
    assert best(tree) == [1, 2, 3]
    tree.add([], [1, 2, 3], [], bytes([40, 30, 20]))
    assert best(tree) == [4]


def test_what_survives_does_so_from_the_log_s_end_on() -> None:
    """A drafter gives the chance that a token and all before it are right; some of those are known by now."""
    tree = DraftTree()
    tree.add([], [1, 2, 3], [], bytes([204, 102, 51]))
    assert chances(tree) == pytest.approx([0.8, 0.5, 0.5], abs=0.01)
    tree.advance([1])
    assert chances(tree) == pytest.approx([0.5, 0.5], abs=0.01)
    tree.add([], [2, 3, 4], [], bytes([255, 128, 128]))  # the drafter has heard of the 1
    assert best(tree) == [2, 3, 4] and chances(tree) == pytest.approx([1.0, 0.5, 1.0], abs=0.01)


def test_survival_that_rises_is_no_more_than_certain() -> None:
    tree = DraftTree()
    tree.add([], [1, 2, 3], [], bytes([0, 255, 0]))
    assert all(0 < chance <= 1 for chance in chances(tree)) and chances(tree)[1] == 1
    assert chances(tree)[0] < 0.01


def test_a_branch_that_the_target_takes_is_the_path_from_then_on() -> None:
    tree = DraftTree()
    tree.add([], [1, 2, 7, 8], [-1, 0, 0, 2], bytes([230, 200, 20, 18]))
    assert best(tree) == [1, 2]
    tree.advance([1, 7])
    assert best(tree) == [8] and chances(tree) == pytest.approx([0.9], abs=0.01)


def test_repeating_a_path_and_going_on_finds_the_nodes_that_are_there() -> None:
    tree = DraftTree()
    for end in range(1, 20):
        assert tree.add([], list(range(end)), [], b"") == 1
    assert tree.size == len(tree.path) == 19
    tree.advance(list(range(9)))
    assert tree.add([], list(range(9, 20)), [], b"") == 1
    assert tree.add([8], list(range(8, 22)), [], b"") == 2
    assert best(tree) == list(range(9, 22)) and tree.size == 13


def test_a_commit_along_a_branch_that_is_longer_than_the_likeliest_path() -> None:
    tree = DraftTree()
    tree.add([], [1, 2, 3, 4], [-1, -1, 1, 2], bytes([200, 50, 50, 50]))
    assert best(tree) == [1]
    tree.advance([2, 3])
    assert best(tree) == [4]


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
    assert not paths or tuple(best(tree)) in paths


def test_equal_tokens_of_two_sources_join_and_count_as_the_one_says_that_is_believed_most() -> None:
    tree = DraftTree()
    assert tree.add([], [1, 2], [], bytes([204, 102]), "a") == 2
    assert tree.add([], [1, 2, 3], [], bytes([255, 51, 51]), "b") == 3, "each says them for the first time"
    assert tree.add([], [1], [], bytes([204]), "a") == 0 and tree.size == 3
    assert tree.path == tree.path_of("b") == [1, 2, 3] and tree.path_of("a") == [1, 2]
    assert chances(tree) == pytest.approx([1.0, 0.5, 1.0], abs=0.01)
    tree.believe({"a": Fixed([1.0]), "b": Fixed([0.1])})
    assert chances(tree) == pytest.approx([0.8, 0.5, 0.1], abs=0.01)


def test_of_two_paths_the_one_is_verified_whose_source_is_believed_more() -> None:
    tree = DraftTree()
    tree.add([], [1], [], bytes([150]), "modest")
    tree.add([], [2, 3], [], bytes([255, 255]), "boastful")
    assert (best(tree), tree.path_of("modest"), tree.path_of("boastful")) == ([2, 3], [1], [2, 3])
    tree.believe({"modest": Fixed([1.0]), "boastful": Fixed([0.4])})
    assert (best(tree), tree.path_of("modest"), tree.path_of("boastful")) == ([1], [1], [2, 3])


def test_a_source_that_fills_the_tree_leaves_the_others_their_room() -> None:
    tree = DraftTree()
    tree.add([], list(range(MAX_NODES)), [-1] * MAX_NODES, b"", "greedy")
    assert tree.add([], [500], [], b"", "greedy") == 0
    assert tree.add([], [500, 501], [], b"", "other") == 2
    assert tree.add([], list(range(2 * MAX_NODES)), [-1] * 2 * MAX_NODES, b"", "other") == MAX_NODES - 2


Paths = dict[tuple[int, ...], tuple[float, int]]  # to each node: its chance and arrival


class PlainTree:
    """The same written down a second time: every path on its own, without a bound."""

    def __init__(self) -> None:
        self.said: dict[tuple[int, ...], dict[str, tuple[float, int]]] = {}  # of each path: by source
        self._arrivals = 0

    def add(
        self, overtaken: list[int], tokens: list[int], parents: list[int], survival: bytes, source: str
    ) -> None:
        self._arrivals += 1
        paths: list[tuple[int, ...]] = []
        for index, token in enumerate(tokens):
            parent = parents[index] if parents else index - 1
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            here, before = (survival[i] if i >= 0 and survival else 255 for i in (index, parent))
            depth = len(overtaken)
            if len(paths[-1]) > depth and paths[-1][:depth] == tuple(overtaken):
                chance = min(1.0, (here + 0.5) / (before + 0.5))
                self.said.setdefault(paths[-1][depth:], {})[source] = (chance, self._arrivals)

    def advance(self, committed: list[int]) -> None:
        steps = len(committed)
        kept = [path for path in self.said if path[:steps] == tuple(committed) and len(path) > steps]
        self.said = {path[steps:]: self.said[path] for path in kept}

    def best(self, source: str = "") -> tuple[list[int], list[float]]:
        """Of all, or of one source: each node as likely as who gives it most, as late as who said it last."""
        paths: Paths = {}
        for path, said in self.said.items():
            chances = [chance for each, (chance, _) in said.items() if source in ("", each)]
            if chances:
                paths[path] = max(chances), max(arrival for _, arrival in said.values())
        best: tuple[int, ...] = ()
        along = []
        while following := [each for each in paths if each[:-1] == best]:
            best = max(following, key=lambda each: paths[each])
            along.append(paths[best][0])
        return list(best), along

    def agrees(self, tree: DraftTree) -> bool:
        own = all(tree.path_of(source) == self.best(source)[0] for source in "ab")
        return own and (tree.path, tree.chances) == self.best() and tree.size == len(self.said)


@given(
    st.lists(
        st.tuples(
            drafts(),
            st.lists(tokens, max_size=2),
            st.booleans(),
            st.booleans(),
            st.sampled_from("aab"),
        ),
        max_size=12,
    )
)
def test_the_path_at_hand_is_the_one_that_the_tree_gives(
    told: list[tuple[tuple[list[int], list[int], list[int]], list[int], bool, bool, str]],
) -> None:
    """However drafts of two sources and commits follow one another."""
    tree, plain, log = DraftTree(), PlainTree(), list[int]()
    for (_, chosen, parents), committed, chain, along, source in told:
        if chain:  # often one that goes on where the tree ends
            draft = [*best(tree), *chosen]
            survival = bytes(255 - depth for depth in range(len(draft)))
            told_now: tuple[list[int], list[int], list[int], bytes] = ([], draft, [], survival)
        else:
            told_now = (log[-1:], [*log[-1:], *chosen], [], b"") if log else ([], chosen, parents, b"")
        tree.add(*told_now, source)
        plain.add(*told_now, source)
        assert plain.agrees(tree)
        if along:
            committed = [*best(tree)[:2], *committed]
        tree.advance(committed)
        plain.advance(committed)
        log += committed
        assert plain.agrees(tree) and tree.size <= MAX_NODES


def test_what_may_never_come_is_cut_off_and_another_path_stands() -> None:
    tree = DraftTree()
    tree.add([], [1, 2, 3], [], bytes([200, 190, 180]), "a")
    tree.cut([1, 2])
    assert tree.path == [1] and list(tree.said) == ["a"] and tree.size == 1
    tree.cut([1])
    assert tree.path == [] and not tree.said
    tree.add([], [1, 2, 3], [], bytes([200, 190, 180]), "a")
    tree.add([], [1, 4, 5], [], bytes([200, 90, 80]), "b")
    assert tree.path == [1, 2, 3]
    tree.cut([1, 2])
    assert tree.path == tree.path_of("b") == [1, 4, 5] and tree.path_of("a") == [1]
    tree.advance([1])
    assert tree.path == [4, 5]
    assert tree.add([1], [1, 2, 3], [], b"", "a") == 2, "its source may say it again"
