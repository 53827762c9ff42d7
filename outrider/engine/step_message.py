"""What the leader of a tensor-parallel group tells the others of a step: integers. Pure.

A message is int32 words; what has 64 bits takes two:

    kind, works, rows, vocabulary                                            the header
    start, tokens, rows, blocks, parents, moves, turn    of each work        counts
    tokens of all works, then blocks, parents, places, moves and turns of all works
    how, key (64), temperature (64)         of each row                      only if tokens are chosen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

import numpy as np
import numpy.typing as npt

from outrider.engine.state_slots import Turn
from outrider.engine.step_inputs import Work
from outrider.sampling.how import How
from outrider.sampling.vocab_parallel import VocabParallelRow

Words = npt.NDArray[np.int32]

HEADER = 4
PER_WORK = 7
PER_ROW = 5


class Kind(IntEnum):
    """What to do."""

    STOP = 0  # the leader leaves
    ANSWER = 1  # show that you are there
    LOGITS = 2  # run the works; everybody gets all logits
    CHOOSE = 3  # run the works and choose a token for each row
    WARM = 4  # compile nothing from now on


@dataclass(frozen=True, slots=True)
class StepMessage:
    """A message as received."""

    kind: Kind
    works: tuple[Work, ...] = ()
    rows: tuple[VocabParallelRow, ...] = ()
    vocab_size: int = 0  # only ids below it may be chosen


def encode_works(works: Sequence[Work]) -> Words:
    """Returns the works' part of a message, as they are now."""
    counts = [
        number
        for work in works
        for number in (
            work.start,
            len(work.tokens),
            work.rows,
            len(work.blocks),
            len(work.parents),
            len(work.moves),
            len(work.turn or ()),
        )
    ]
    tokens = chain.from_iterable(work.tokens for work in works)
    blocks = chain.from_iterable(work.blocks for work in works)
    parents = chain.from_iterable(work.parents for work in works)
    places = chain.from_iterable(work.places for work in works)
    moves = chain.from_iterable(pair for work in works for pair in work.moves)
    turns = chain.from_iterable(work.turn or () for work in works)
    return np.fromiter(chain([len(works)], counts, tokens, blocks, parents, places, moves, turns), np.int32)


def encode(
    kind: Kind, works: Words | None = None, rows: Sequence[VocabParallelRow] = (), vocab_size: int = 0
) -> Words:
    """Returns a whole message; `works` come from encode_works."""
    count, rest = (0, np.empty(0, np.int32)) if works is None else (works[0], works[1:])
    header = np.array([kind, count, len(rows), vocab_size], dtype=np.int32)
    return np.concatenate([header, rest, _row_words(rows)])


def decode(words: Words) -> StepMessage:
    kind, work_count, row_count, vocab_size = words[:HEADER].tolist()
    at = HEADER + PER_WORK * work_count
    counts = words[HEADER:at].reshape(work_count, PER_WORK).tolist()
    ends = np.cumsum([at, *(sum(count[index] for count in counts) for index in (1, 3, 4, 4))]).tolist()
    tokens_at, blocks_at, parents_at, places_at, moves_at = ends  # of each kind, the first word not taken yet
    turns_at = moves_at + 2 * sum(count[5] for count in counts)
    works = []
    for start, tokens, rows, blocks, parents, moves, turn in counts:
        pairs = words[moves_at : moves_at + 2 * moves].reshape(moves, 2).tolist()
        works.append(
            Work(
                words[blocks_at : blocks_at + blocks].tolist(),
                start,
                words[tokens_at : tokens_at + tokens].tolist(),
                rows,
                tuple(words[parents_at : parents_at + parents].tolist()),
                tuple(words[places_at : places_at + parents].tolist()),
                tuple((source, target) for source, target in pairs),
                turn=Turn(*words[turns_at : turns_at + turn].tolist()) if turn else None,
            )
        )
        tokens_at, blocks_at = tokens_at + tokens, blocks_at + blocks
        parents_at, places_at = parents_at + parents, places_at + parents
        moves_at, turns_at = moves_at + 2 * moves, turns_at + turn
    return StepMessage(Kind(kind), tuple(works), _rows(words[turns_at:], row_count), vocab_size)


def _row_words(rows: Sequence[VocabParallelRow]) -> Words:
    words = np.empty((len(rows), PER_ROW), dtype=np.int32)
    words[:, 0] = [row.how for row in rows]
    words[:, 1:3] = np.array([row.key for row in rows], dtype=np.uint64).view(np.int32).reshape(-1, 2)
    words[:, 3:5] = (
        np.array([row.temperature for row in rows], dtype=np.float64).view(np.int32).reshape(-1, 2)
    )
    return words.reshape(-1)


def _rows(words: Words, count: int) -> tuple[VocabParallelRow, ...]:
    words = words.reshape(count, PER_ROW)
    keys = np.ascontiguousarray(words[:, 1:3]).view(np.uint64)[:, 0].tolist()
    temperatures = np.ascontiguousarray(words[:, 3:5]).view(np.float64)[:, 0].tolist()
    return tuple(
        VocabParallelRow(How(how), key, temperature)
        for how, key, temperature in zip(words[:, 0].tolist(), keys, temperatures, strict=True)
    )
