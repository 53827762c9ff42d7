"""Several guesses of one pass: drafts that are trained to guess behind mask tokens, too.

Behind the text stand masks, and each says what comes in its place (PARD: An et al., arXiv 2504.18583). Such a
checkpoint is an ordinary one; `pard_token` of its config.json is the mask. What masks leave in the cache goes
with the pass: the next one reads the guesses themselves. No torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drafter.drafting import Part
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.state_slots import StateSlots
from outrider.errors import StartupError

MOST_GUESSES = 8  # of a pass: published drafts are trained on so many


def mask_token(config: Any) -> int | None:
    """Returns the mask of a model's configuration; None if it has none. Raises StartupError."""
    mask = getattr(config, "pard_token", None)
    if mask is None or (type(mask) is int and 0 <= mask < config.get_text_config().vocab_size):
        return mask
    raise StartupError(
        f"the draft model's config.json says pard_token: {mask!r}, which is no id of its tokens; correct it, "
        "or remove it for one guess a pass"
    )


def with_masks(parts: list[Part], mask: int | None, pool: BlockPool, most_tokens: int) -> list[Part]:
    """Returns parts of trunks with as many masks behind each as guesses are wanted, where there is room in
    the pool and in a step of so many tokens."""
    if mask is None:
        return parts
    room, masked = most_tokens - sum(len(part.tokens) for part in parts), list[Part]()
    for part in parts:
        count = max(min(_wanted(part, pool.states) - 1, room, part.free_slots(pool)), 0)
        pool.extend(part.drafting.table, count)
        room -= count
        tokens = part.tokens + (mask,) * count
        masked.append(replace(part, tokens=tokens, rows=part.rows + count, masks=count))
    return masked


def _wanted(part: Part, states: StateSlots | None) -> int:
    drafting = part.drafting
    if part.start + len(part.tokens) < drafting.session.length:
        return 0  # there is text to read yet
    if drafting.counts is not None or drafting.place is not None:
        return 0  # a draw depends on those before it
    return min(drafting.room(states), MOST_GUESSES)
