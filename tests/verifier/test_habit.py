"""What a text is expected to do where its grammar leaves little choice."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from demo.pair import TARGET
from outrider.grammar import Grammars, Mask, Place
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from verifier.draft_tree import DraftTree
from verifier.habit import FOLLOWERS, KNOWN, LATEST, Habit
from verifier.own_guesses import OwnGuesses

VOCABULARY = 8192
FIELDS = ["name", "occupation", "residence", "description"]
PEOPLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"age": {"type": "integer"}, **{field: {"type": "string"} for field in FIELDS}},
        "required": ["age", *FIELDS],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_pattern": r"[ \t]{1,2}|\r?\n[ \t]{0,40}"},
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(PEOPLE))
TEXTS = [
    [12, "Ada", "smith", "a house by the sea", "keeps nine cats"],
    [57, "Bob Jones", "teacher of music", "the old town", "is fond of rain"],
    [31, "Cyd", "baker", "a boat", "knows many songs of the north"],
    [84, "Dora Lind", "physician", "near the bridge", "has seen most of it"],
]


def mask(*tokens: int) -> Mask:
    bits = np.zeros(VOCABULARY, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little")


def test_what_came_behind_the_same_token_is_likely_if_it_may_come() -> None:
    habit = Habit((), [5, 6, 7, 5, 8, 5])
    assert habit.choose(None, mask(6, 7, 9)) == 6
    assert habit.choose(None, mask(6, 7, 8)) == 8, "of equals the latest"
    assert habit.choose(6, mask(7, 8)) == 7
    assert habit.choose(6, mask(8, 9)) == 8, "elsewhere it was said"
    assert habit.choose(6, mask(9)) == 9, "nothing else may come"
    assert habit.choose(6, mask(9, 10)) is None
    assert habit.choose(None, mask(*range(0, VOCABULARY, 8))) is None, "there is much choice"


def test_a_pair_is_believed_as_often_as_it_has_come() -> None:
    habit = Habit((), [5, 6, 5])
    first = habit.chance(None, 6).value
    for _ in range(9):
        habit.chance(None, 6).observe(False)
    habit.follow([6, 5], 2)
    assert habit.chance(None, 6).value < 0.3 < first
    habit.follow([7, 5], 2)
    assert habit.choose(None, mask(6, 7)) == 7


def test_the_prompt_shows_what_follows_what_and_nothing_else() -> None:
    habit = Habit([5, 6, 7, 3, 4], ())
    assert habit.choose(5, mask(6, 7)) == 6
    assert habit.choose(6, mask(3, 5)) is None
    assert habit.choose(None, mask(3, 5)) is None
    assert Habit((), ()).choose(None, mask(3, 5)) is None
    assert Habit([5, 10 * VOCABULARY], ()).choose(5, mask(1, 2)) is None


def test_what_is_known_of_a_text_is_bounded() -> None:
    habit, log = Habit((), ()), list[int]()
    for token in range(3 * KNOWN):
        log += [1, token % 7, token]
        habit.follow(log, 3)
    assert len(habit._after) <= KNOWN and len(habit._latest) <= LATEST
    assert max(map(len, habit._after.values())) <= FOLLOWERS


def place_at(files: str, output: Sequence[int] = ()) -> Place:
    ready = threading.Event()
    place = Grammars(files, [0]).place(GRAMMAR, output, ready.set)
    assert ready.wait(60)
    place._costly = False  # as on a quicker machine
    return place


def steps(files: str, text: Sequence[int], k: int) -> tuple[int, int]:
    """Returns (steps, draft tokens that were wrong) of a target that says the text."""
    place, log = place_at(files), list[int]()
    place._company.chose = lambda _: None  # type: ignore[method-assign]
    own = OwnGuesses.of(SessionParams((1,), SamplingParams(), 999, grammar=GRAMMAR), ())
    assert own is not None
    taken = wrong = 0
    while len(log) < len(text):
        tree = DraftTree()
        own.add_to(tree, min(k, len(text) - len(log) - 1), place.likely)
        right = 0
        while right < len(tree.path) and tree.path[right] == text[len(log) + right]:
            right += 1
        said = text[len(log) : len(log) + right + 1]
        log += said
        place.follow(said)
        own.follow(log, len(said))
        taken, wrong = taken + 1, wrong + len(tree.path) - right
    return taken, wrong


@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_what_stands_between_the_parts_of_a_json_text_takes_few_steps(form: dict[str, object]) -> None:
    """Of it a grammar forces the keys alone: there may be white space, or none."""
    files = (TARGET / "tokenizer.json").read_text()
    people = [dict(zip(["age", *FIELDS], each, strict=True)) for each in TEXTS]
    tokenizer = Tokenizer.from_str(files)
    text = tokenizer.encode(json.dumps(people, **form), add_special_tokens=False).ids  # type: ignore[arg-type]
    values = sum(
        len(tokenizer.encode(json.dumps(value), add_special_tokens=False).ids)
        for each in TEXTS
        for value in each
    )
    taken, wrong = steps(files, text, 16)
    assert taken < values + 0.3 * (len(text) - values), "most of what is between them is guessed"
    assert wrong < taken / 3


def test_the_next_tokens_are_looked_for_without_a_trace() -> None:
    files = (TARGET / "tokenizer.json").read_text()
    text = Tokenizer.from_str(files).encode('[{"age": 1', add_special_tokens=False).ids
    one, other = place_at(files), place_at(files)
    one._company.chose = lambda _: None  # type: ignore[method-assign]
    for token in text:
        one.likely(8, lambda _, mask: int(np.flatnonzero(np.unpackbits(mask, bitorder="little"))[0]))
        for place in (one, other):
            place.follow([token])
        masks = [place.masks([])[0]() for place in (one, other)]
        assert masks[0] is not None and masks[1] is not None
        assert (masks[0] == masks[1]).all() and one.fault is None
