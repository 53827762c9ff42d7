"""Text to token ids and back, as the target's tokenizer does it. A verifier sends it: no model files here."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain
from json import loads
from typing import Any

import tokenizers

from outrider.errors import PeerRefused, Unavailable
from router.detokenize import PANICS_TOLD, Detokenizer, detokenizer, hidden_ids, piece
from router.infilling import form, infilling
from router.rendering import Conversation
from router.requests import TokenizerFiles
from router.template_process import TemplateProcess

log = logging.getLogger(__name__)
MOST_GROWTH = 64  # bytes that a tokenizer may make of one; those of known models make up to 6
MOST_TOKEN_BYTES = 2**12  # a thousand blanks of a byte-level vocabulary have half of them
PIECE = 2**14  # characters of a text that are tokenized to count, and tokens of which the text is counted
HUGE = (
    2**20
)  # characters of a text of which one is tokenized at a time: it takes up to 300 bytes for each byte
_huge = threading.Lock()


class Tokenizer:
    """One model's tokenizer and chat template. Holds no state of any request."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Raises PeerRefused if the files cannot be read."""
        self._tokenizer = _parse(files)
        # A prompt is never cut or padded behind the client's back, whatever the file says.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.longest_token = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        """bytes of text, at most"""
        if self.longest_token > MOST_TOKEN_BYTES:
            raise PeerRefused(
                f"the tokenizer has a token of {self.longest_token} bytes; a router takes {MOST_TOKEN_BYTES}"
            )
        self.special_ids = hidden_ids(self._tokenizer)
        self._hidden: dict[tuple[str, ...], frozenset[int]] = {(): self.special_ids}  # by markers of formats
        try:
            self._template = TemplateProcess(files.chat_template, files.special_tokens)
        except Unavailable:  # that says nothing of the template
            raise
        except Exception as error:
            raise PeerRefused(f"the tokenizer's chat template cannot be compiled: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns token ids, with the special tokens that the tokenizer's post-processor adds."""
        return self._encode(text, add_special_tokens=True)

    def render(self, conversation: Conversation) -> str:
        """Returns the conversation as the model was trained on it, its special tokens included.

        Raises InvalidRequest if the template is missing or refuses the messages."""
        return self._template.render(conversation)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Returns token ids of a rendered conversation."""
        return self._encode(text, add_special_tokens=False)

    def exceeds(self, text: str, most: int) -> bool:
        """Returns True only if the text has more tokens than that. It is tokenized piece by piece, until that
        is sure: it takes a piece's memory, and of a text far too long little time. A token in which it was
        cut may count as one for each of its bytes."""
        sure = 0
        for start in range(0, len(text), PIECE):
            found = self._encode(text[start : start + PIECE], add_special_tokens=False)
            sure += max(len(found) - self.longest_token, 0)
            if sure > most:
                return True
        return False

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # As a batch: other threads run meanwhile. `encode` keeps the interpreter to itself, and an event loop
        # would stand still for seconds over a megabyte of text. And fast: without the places of the tokens in
        # the text, which nobody asks for, it takes a third of the time and a fraction of the memory.
        with PANICS_TOLD, _huge if len(text) > HUGE else nullcontext():
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the whole text."""
        # As a batch, as above: `decode` keeps the interpreter to itself.
        with PANICS_TOLD:
            (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def writes_more(self, ids: Sequence[int], most: int) -> bool:
        """Returns whether the text of these tokens has more characters than that. It is made piece by piece:
        of one far too long only the beginning."""
        if len(ids) * self.longest_token <= most:
            return False
        written = 0
        for start in range(0, len(ids), PIECE):
            written += len(self.decode(ids[start : start + PIECE], skip_special_tokens=False))
            if written > most:
                return True
        return False

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary writes it."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns what a token adds to a text, special tokens as they are written."""
        return piece(self._tokenizer, token_id)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token as the vocabulary writes it."""
        return self._tokenizer.token_to_id(token)

    def around(self, first: str, last: str) -> tuple[int, ...] | None:
        """Returns the prompt for a text between two others; None if the tokenizer has no tokens for that."""
        found = form(self.token_id)
        if found is None:
            return None
        texts = [self._encode(text, add_special_tokens=False) for text in (first, last)]
        return infilling(found, self.encode("")[:1], *texts)

    def detokenizer(self, markers: tuple[str, ...] = (), special: bool = False) -> Detokenizer:
        """Returns a new detokenizer, for one output. `markers`: special tokens that are part of the text; if
        `special`, all are."""
        if markers not in self._hidden:
            self._hidden[markers] = hidden_ids(self._tokenizer, markers)
        return detokenizer(self._tokenizer, frozenset() if special else self._hidden[markers])


def load(files: TokenizerFiles) -> Tokenizer:
    """Returns the tokenizer, built once. Building takes up to a second for a large vocabulary.

    Raises PeerRefused if the files cannot be used."""
    try:
        return _build(
            files.hash, files.json, files.chat_template, tuple(sorted(files.special_tokens.items()))
        )
    except PeerRefused as refused:
        _warn(files.hash, refused.message)
        raise


# Keyed by all that the tokenizer is made of: two with the same table may still split or render differently.
@lru_cache(maxsize=8)
def _build(
    hash: str, json: str, chat_template: str, special_tokens: tuple[tuple[str, str], ...]
) -> Tokenizer:
    return Tokenizer(TokenizerFiles(hash, json, chat_template, dict(special_tokens)))


@lru_cache(maxsize=64)  # once for each
def _warn(hash: str, sentence: str) -> None:
    log.warning("clients of the model of tokenizer %s can give token ids alone: %s", hash[:12], sentence)


def _parse(files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        with PANICS_TOLD:
            found = tokenizers.Tokenizer.from_str(files.json)
    except Exception as error:  # the library raises plain Exception
        raise PeerRefused(f"the tokenizer cannot be read: {error}") from error
    ways = {
        "normalizer and pre-tokenizer": (found.normalizer, found.pre_tokenizer),
        "decoder": (found.decoder,),
    }
    if found.decoder is not None and _has_expression(loads(found.decoder.__getstate__())):
        raise PeerRefused(
            "the tokenizer's decoder has a regular expression, which may take any time, and all of a router's"
        )
    for name, parts in ways.items():  # the parts of a way are one after the other
        growth = math.prod(_growth(loads(part.__getstate__())) for part in parts if part is not None)
        if growth > MOST_GROWTH:
            raise PeerRefused(
                f"the tokenizer's {name} may make more than {MOST_GROWTH} bytes of one: a short text could "
                "take all memory of a router"
            )
    return found


def _has_expression(part: object) -> bool:
    if isinstance(part, dict):
        return "Regex" in part or any(map(_has_expression, part.values()))
    return isinstance(part, list) and any(map(_has_expression, part))


def _growth(part: Mapping[str, Any]) -> int:
    """Returns how many bytes a part of a tokenizer may make of one, counting what does so each time that it
    stands in a row."""
    match part:
        case {"type": "Sequence"}:
            inner = chain.from_iterable(value for value in part.values() if isinstance(value, list))
            return min(math.prod(map(_growth, inner)), 2**31)
        case {"type": "Replace", "pattern": pattern, "content": content}:
            found = pattern.get("String") or " "  # an expression may fit one character
            return max(1, -(-len(content.encode()) // len(found.encode())))
        case {"type": "ByteLevel"}:
            return 2
        case {"type": "Metaspace"}:
            return 3
    return 1
