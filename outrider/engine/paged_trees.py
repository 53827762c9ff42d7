"""Drafts that are trees, for a kernel that reads pages: each branch is a sequence of its own. Pure.

A kernel lets a token see all that stands before it in its sequence. So a branch gets blocks of its own from
the one on in which its first token stands, and shares those before with what it branches from. In its first
block stands again what comes before it there: what was in the cache is copied before the step, and what runs
in the step itself is stored at more than one place. Every token stands at its position, in blocks as those
of a text are. So a row on a branch gets the bits of a text that goes on so, whatever a kernel's order of
sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.engine.branching import depths, line_of
from outrider.engine.step_inputs import Work

AGAIN = 8  # places where what runs in a step is stored again, for each token of a step


def chains_of(parents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the branches of a tree: runs of tokens behind the line that follow one another, as (first,
    end)."""
    first = line_of(parents)
    for token in range(first + 1, len(parents) + 1):
        if token == len(parents) or parents[token] != token - 1:
            yield first, token
            first = token


def lay_out_on_pages(size: int, start: int, position: int, parents: Sequence[int]) -> list[int | None]:
    """Returns the places of a tree's tokens, the first of which has that position, in the session's slots;
    None = there is none for it. `size`: of a block. `start`: the position from which on tokens run in the
    step."""
    line, depth = line_of(parents), depths(parents)
    places: list[int | None] = list(range(position, position + line))
    free = -(-(position + line) // size) * size  # the first slot of the blocks that are not in use
    for first, end in chains_of(parents):
        at, count, before = position + depth[first], end - first, parents[first]
        begin = at // size * size
        if at - max(begin, start) > AGAIN * count or (before >= line and places[before] is None):
            places += [None] * count
            continue
        places += range(free + at - begin, free + at - begin + count)
        free += -(-(at + count) // size) * size - begin
    return places


@dataclass(slots=True)
class Split:
    """A step's works without trees, each branch a work of its own."""

    works: list[Work]
    copies: list[tuple[int, int]] = field(default_factory=list)  # slots, from and to, before the step
    again: list[tuple[int, int]] = field(default_factory=list)  # a token of the step, and one more slot of it


def split(works: Sequence[Work], size: int) -> Split:
    """Returns these works, in blocks of this size, with trees as they were laid out on pages. Tokens and rows
    keep their order."""
    found, first = Split([]), 0
    for work in works:
        if work.parents:
            _split(work, size, first, found)
        else:
            found.works.append(work)
        first += len(work.tokens)
    return found


def _split(work: Work, size: int, first_token: int, found: Split) -> None:
    """Adds a work that has a tree, whose first token is the step's `first_token`."""
    parents, start, blocks = work.parents, work.start, work.blocks
    line, depth = line_of(parents), depths(parents)
    text = len(work.tokens) - len(parents)
    position = start + text
    on_branches = len(parents) - line
    tokens = work.tokens[: text + line]
    found.works.append(Work(blocks, start, tokens, work.rows - on_branches))
    tables: dict[int, Sequence[int]] = {}  # of each token on a branch
    for first, end in chains_of(parents):
        at, count, place = position + depth[first], end - first, work.places[first]
        begin = at // size
        own = blocks[place // size : (place + count - 1) // size + 1]
        table = [*tables.get(parents[first], blocks)[:begin], *own]
        tables |= dict.fromkeys(range(first, end), table)
        for copied in range(begin * size, min(start, at)):
            offset = copied % size
            found.copies.append((blocks[begin] * size + offset, own[0] * size + offset))
        before, token = at - 1, parents[first]
        while before >= max(begin * size, start):
            again = text + token if before >= position else before - start
            found.again.append((first_token + again, own[0] * size + before % size))
            token, before = parents[token] if token >= 0 else -1, before - 1
        found.works.append(Work(table, at, work.tokens[text + first : text + end], count))
