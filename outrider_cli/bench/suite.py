"""The prompts of `outrider bench --suite`: conversations in the six categories of Spec-Bench, and two more.

They were written for this, so that no model was trained on them. Source of the categories: Xia et al.,
Spec-Bench, arXiv 2401.07851.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("suite.json")
Conversation = tuple[str, ...]  # what the user says, and the answers between; the user has the last word


@cache
def suite() -> dict[str, list[Conversation]]:
    """Returns the conversations of each category."""
    told = json.loads(FILE.read_text(encoding="utf-8"))
    return {category: [tuple(turns) for turns in found] for category, found in told.items()}


def messages(conversation: Conversation) -> list[dict[str, str]]:
    """Returns the conversation as chat templates and the API take it."""
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(conversation)]
