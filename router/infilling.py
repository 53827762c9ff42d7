"""Prompts for a text between two others, by the tokens that code models were trained on for that. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# (before the text that comes first, before the text that comes last, before the one in between), each in the
# order in which they stand.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek-Coder
)


def form(token_id: Callable[[str], int | None]) -> tuple[int, int, int] | None:
    """Returns the ids of the form that a tokenizer has, or None. `token_id`: that of a token, None if it has
    none."""
    for tokens in FORMS:
        first, last, between = map(token_id, tokens)
        if first is not None and last is not None and between is not None:
            return first, last, between
    return None


def infilling(
    ids: tuple[int, int, int], begin: Sequence[int], first: Sequence[int], last: Sequence[int]
) -> tuple[int, ...]:
    """Returns the prompt after which a model writes what stands between two texts. `begin`: what every text
    begins with."""
    return (*begin, ids[0], *first, ids[1], *last, ids[2])
