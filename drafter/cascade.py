"""Guesses of a cheaper source that the draft model checks in one step of its own, before they travel.

Behind the text that runs stand the tokens that a look-up expects next. Each row says what the model itself
guesses there: so as far as it agrees it has the guesses that it would have made one by one, and where it does
not, its own stands and the rest is dropped. What is sent is the same, after fewer steps. Source: Chen et al.,
"Cascade Speculative Drafting", arXiv 2312.11462, the vertical cascade. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from drafter.drafting import Part
from drafter.look_up import LookUp
from outrider.engine.kv_blocks import BlockPool

MOST_CHECKED = 8  # tokens in a step


def with_lookups(parts: list[Part], pool: BlockPool, most_tokens: int) -> list[Part]:
    """Returns parts of trunks with what look-ups expect behind each, where there is room in the pool and in a
    step of so many tokens."""
    room, checking = most_tokens - sum(len(part.tokens) for part in parts), list[Part]()
    for part in parts:
        drafting, session = part.drafting, part.drafting.session
        if drafting.one_row or part.start + len(part.tokens) < session.length:
            checking.append(part)  # its draw depends on those before it, or there is text to read yet
            continue
        if drafting.look_up is None:
            drafting.look_up = LookUp(session)
        most = min(drafting.room(pool.states) - 1, MOST_CHECKED, room, part.free_slots(pool))
        checked = tuple(drafting.look_up.expects(max(most, 0)))
        pool.extend(drafting.table, len(checked))
        room -= len(checked)
        tokens, rows = part.tokens + checked, part.rows + len(checked)
        checking.append(replace(part, tokens=tokens, rows=rows, checked=len(checked)))
    return checking
