"""What suffix lookup adds to a draft model: the real lookup and tree, and a model whose guesses are drawn.

In steps of the target, which no clock has a part in."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from demo.heldout import heldout_text
from drafter.session import DraftSession, DraftSpec
from drafter.suffix import SuffixProposer
from drafter.survival import on_the_wire
from outrider.net.draft_right import right
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from verifier.drafter_peer import DrafterPeer
from verifier.running import Running
from verifier.session import NO_BRANCH, Session, SessionSpec

RIGHT, AHEAD, WINDOW = 0.75, 8, 16  # of the model's guesses; how many it has a step; the lookup's
PROMPT, MOST = 300, 600  # tokens
KEY, WRONG = b"k" * 16, 0


def tokens_of(text: str) -> list[int]:
    """Words and signs, by number."""
    words = text.replace("(", " ( ").replace(".", " . ").replace("\n", " \n ").split(" ")
    numbers: dict[str, int] = {}
    return [numbers.setdefault(word, len(numbers) + 1) for word in words if word]


def copy_edit() -> list[int]:
    """A text, and the same with a word in every 25th place changed."""
    text = tokens_of(heldout_text("textwrap.py"))[:PROMPT]
    return text + [9000 + at if at % 25 == 4 else token for at, token in enumerate(text)]


def once(name: str) -> list[int]:
    """A text that repeats itself as code does."""
    return tokens_of(heldout_text(name))[:MOST]


def steps(text: Sequence[int], sources: Sequence[str], least: float = NO_BRANCH) -> int:
    """Returns how many steps the text behind the prompt takes with drafts of these sources. `least`: of what
    is verified beside a path."""
    params = SessionParams(tuple(text[:PROMPT]), SamplingParams(temperature=0.0), len(text) - PROMPT)
    running = Running(Session(SessionSpec(b"s" * 16, params, (), 10**5, KEY), WINDOW), None)
    running.table.blocks = [0]
    seats = {name: running.seat(number) for number, name in enumerate(sources)}
    for turn, (name, seat) in enumerate(seats.items()):
        seat.take(DrafterPeer(name, lambda: 0.0), turn, right(KEY, turn, seat=turn))
    proposer = SuffixProposer(lambda _: None, lambda *_: None, time.perf_counter)
    looking_up = DraftSession(DraftSpec(b"s" * 16, params, (), b"", 10**5), WINDOW)
    proposer.open(looking_up)
    count, log = 0, running.session.log
    while running.session.room > 0:
        base = len(log)
        running.table.length = base - 1
        if "model" in seats:
            chain = [
                token if random.Random(at).random() < RIGHT else WRONG
                for at, token in enumerate(text[base : base + AHEAD], base)
            ]
            survival = on_the_wire([RIGHT ** (depth + 1) for depth in range(len(chain))])
            seats["model"].offer(base, chain, (), survival, 0.0)
        said = looking_up.tell()
        if "suffix" in seats and said[0]:
            seats["suffix"].offer(base, said[0], said[1], on_the_wire(said[2]), 0.0)
        nodes = running.nodes(least).in_chains()
        coming = [[], *nodes.paths]
        chosen = [
            text[base + len(path)]
            if path == list(text[base : base + len(path)]) and base + len(path) < len(text)
            else WRONG + 1
            for path in coming
        ]
        outcome = running.settle(nodes, chosen, 0.0)
        proposer.commit(looking_up, base, outcome.tokens)
        count += 1
    assert log == list(text)
    return count


@pytest.mark.parametrize("least", [NO_BRANCH, 0.05], ids=["paths", "trees"])
def test_suffix_lookup_beside_a_model_saves_a_third_of_an_edits_steps_and_costs_none_elsewhere(
    least: float,
) -> None:
    both, model = ["model", "suffix"], ["model"]
    edit = copy_edit()
    assert 1.5 * steps(edit, both, least) <= steps(edit, model, least)
    assert steps(edit, both, least) <= steps(edit, ["suffix"], least)
    texts = [once(name) for name in ("csv.py", "fractions.py", "graphlib.py")]
    alone = sum(steps(text, model, least) for text in texts)
    assert 0.99 * sum(steps(text, both, least) for text in texts) <= alone
