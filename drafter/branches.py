"""Decides which branches are worth a forward: where a draft may be wrong, what would follow. Pure.

While no trunk has a likely token to draft, the drafter goes on from the likeliest corrections. The chance
that a branch is of use is that of the trunk up to where it leaves, times that of the guess there being wrong,
times that of its own token being the target's. See docs/drafts.md, "Branches".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drafter.session import Branch, DraftSession, chance_of

MOST_BRANCHES = 12  # of a session
MOST_GUESSES = 12  # of a branch
LEAST_CHANCE = 0.02  # below it no forward is spent


@dataclass(frozen=True, slots=True)
class Growth:
    """One more guess on a branch."""

    chance: float  # P(the target comes to where the guess is for)
    at: int  # position at which the branch leaves the trunk
    rank: int  # which alternative it takes there
    branch: Branch | None  # None = it is not there yet


def growths(session: DraftSession, cached: int) -> Iterator[Growth]:
    """Yields every branch that could grow, or begin; `cached` is the trunk's length in the cache."""
    if session.resting:
        return
    grown = {(branch.at, branch.rank): branch for branch in session.branches}
    reach = 1.0  # P(the target takes the trunk up to here)
    for at, guess in enumerate(session.drafted, len(session.log)):
        if at > cached or reach * (1 - guess.acceptance) < LEAST_CHANCE:
            reach *= guess.acceptance
            continue
        for rank in range(len(guess.alternatives)):
            chance = reach * chance_of(guess, rank)
            branch = grown.get((at, rank))
            length = 0
            if branch is not None:
                length = len(branch.guesses)
                for further in branch.guesses:
                    chance *= further.acceptance
            elif len(session.branches) >= MOST_BRANCHES:
                continue
            if chance >= LEAST_CHANCE and length < MOST_GUESSES and at + 1 + length < session.last:
                yield Growth(chance, at, rank, branch)
        reach *= guess.acceptance
