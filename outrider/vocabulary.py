"""Tokens of two vocabularies: which are the same, and as what one's are read in the other. No torch.

A token is what it spells: bytes of text, or the name or role of a special one. So "Ġthe" and "▁the" are the
same, and so are two tokens that end a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from llguidance import LLTokenizer

from outrider.errors import StartupError
from outrider.wire.description import TokenizerFiles

MARK = b"\xff"  # around the name of a special token; no byte of a text
ROLES = ("eos_token", "bos_token", "pad_token")  # of special tokens that mean one thing under any name
_SPECIAL = re.compile(rb"(\xff[^\xff]+\xff)")
SAMPLE = b"""
The library opens at nine, and by noon every table near the windows is taken. "Do you come here often?" she
asked; he said that he'd been reading the same 300 pages since 1987, more or less, and still didn't know how
it would end. Nobody laughed. Prices rose by 4.5 % in March, the ministry told reporters on Tuesday.

def total(items: list[dict], rate: float = 0.19) -> float:
    # The sum of all prices, with taxes.
    net = sum(item["price"] * item.get("count", 1) for item in items if item["price"] is not None)
    return round(net * (1 + rate), 2)

for (let i = 0; i < rows.length; i++) { console.log(`row ${i}: ${JSON.stringify(rows[i])}`); }
{"id": 17, "name": "Ana", "tags": ["new", "paid"], "address": {"city": "Porto", "zip": "4000-123"}}
SELECT name, COUNT(*) FROM orders WHERE created_at >= '2024-01-01' GROUP BY name ORDER BY 2 DESC;

1. First, check that the server is running. 2. Then open the settings, and choose **Network**.
Der Zug nach Bonn geht um acht Uhr, wenn nichts mehr dazwischenkommt. Elle n'a rien dit, mais elle souriait.
"""


class Vocabulary:
    """The tokens of one tokenizer, and what they spell."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Raises StartupError if that cannot be told."""
        try:
            named = [(role, files.special_tokens[role]) for role in ROLES if role in files.special_tokens]
            table = tokenizers.Tokenizer.from_str(files.json)
            roles = {role: id for role, name in named if (id := table.token_to_id(name)) is not None}
            self._tokenizer = LLTokenizer(files.json, eos_token=roles.get("eos_token", 0), slices=[])
            self.first = tuple(table.encode("").ids)  # what every text begins with
        except Exception as error:  # the libraries raise plain ones
            reason = str(error).strip().partition("\n")[0]
            raise StartupError(
                f"what the tokens of a tokenizer spell cannot be told ({reason}): choose a draft model that "
                "has its target's tokenizer, or --propose suffix"
            ) from None
        self.size = int(self._tokenizer.vocab_size)
        self.ends = tuple(id for role, id in roles.items() if role == "eos_token")
        self._pieces = [self._piece(id) for id in range(self.size)]
        # Of several tokens for the same bytes the last: those of single bytes, which are spares, come first.
        self.ids = {piece: id for id, piece in enumerate(self._pieces) if piece}
        for role, id in reversed(roles.items()):  # where one has two roles, the first of them is told
            self._pieces[id] = MARK + role.encode() + MARK
            self.ids[self._pieces[id]] = id

    def _piece(self, id: int) -> bytes:
        piece = bytes(self._tokenizer.decode_bytes([id]))
        return MARK + piece + MARK if self._tokenizer.is_special_token(id) else piece

    def piece(self, id: int) -> bytes:
        """Returns what a token spells; a special one its name between marks."""
        return self._pieces[id] if id < self.size else b""

    def spell(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self.piece, ids))

    def tokens(self, text: bytes, sure: bool = False) -> list[int]:
        """Returns the tokens of a text, which may begin and end amid a character; if `sure`, those only that
        stay whatever follows. Special tokens that are not known here are left out."""
        *runs, last = _SPECIAL.split(text)
        found = list[int]()
        for run in runs:
            if _SPECIAL.fullmatch(run):
                found += (self.ids[run],) if run in self.ids else ()
            else:
                found += self._tokenizer.tokenize_bytes(run)
        return found + (self._tokenizer.tokenize_partial if sure else self._whole)(last)[0]

    def _whole(self, text: bytes) -> tuple[list[int], bytes]:
        return self._tokenizer.tokenize_bytes(text), b""


def is_special(piece: bytes) -> bool:
    """Returns whether this is what a special token spells."""
    return _SPECIAL.fullmatch(piece) is not None


@dataclass(frozen=True, slots=True)
class Reading:
    """How a draft model reads its target's tokens, and which of them it can guess."""

    read_as: tuple[tuple[int, ...], ...]  # by the target's id: the draft's ids, at least one
    common: Mapping[int, int]  # of the target's ids, in rising order, to the draft's: tokens of both
    share: float  # of the target's tokens of ordinary text, those in `common`


def reading(draft: Vocabulary, target: Vocabulary) -> Reading:
    """Compares two vocabularies. May take a second."""
    read_as, common = list[tuple[int, ...]](), dict[int, int]()
    for id in range(target.size):
        piece = target.piece(id)
        same = draft.ids.get(piece)
        if same is not None:
            common[id] = same
            read_as.append((same,))
        else:
            read_as.append(tuple(draft.tokens(piece.strip(MARK))) or (0,))
    sample = target.tokens(SAMPLE)
    return Reading(tuple(read_as), common, sum(id in common for id in sample) / max(len(sample), 1))
