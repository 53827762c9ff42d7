"""Token ids to text as they come: whole characters only, in the end what decoding all at once gives."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Protocol

import tokenizers

from outrider.errors import OutriderError

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # sentencepiece's
REMEMBERED = 2**15  # tokens whose bytes are
_UTF8_CONTINUATION_BYTES = 3  # most that can follow a character's first byte


class _Panics:
    """A panic of the tokenizers library is no Exception to Python, and nobody would answer the request."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and kind.__module__ == "pyo3_runtime":
            raise OutriderError("the model's tokenizer failed at this text")


PANICS_TOLD = _Panics()


class Detokenizer(Protocol):
    """Turns one output's token ids into text. Cost per token does not grow with the output."""

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these tokens settle; special tokens give none, unless they were asked for."""
        ...

    def flush(self) -> str:
        """Returns the rest, at the end of the output: an unfinished character becomes U+FFFD."""
        ...


def detokenizer(tokenizer: tokenizers.Tokenizer, hidden: frozenset[int] | None = None) -> Detokenizer:
    """Returns the detokenizer that fits the tokenizer's decoder. `hidden`: ids that give no text; None =
    those of special tokens."""
    if _byte_level(tokenizer):
        return ByteLevelDetokenizer(tokenizer, hidden)
    return WindowDetokenizer(tokenizer, hidden)


def piece(tokenizer: tokenizers.Tokenizer, id: int) -> bytes:
    """Returns what a token is amid a text."""
    return _pieces(tokenizer)(id)


@lru_cache(maxsize=8)
def _pieces(tokenizer: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """Returns `piece` of a tokenizer, which goes with what is remembered of it."""
    return lru_cache(maxsize=REMEMBERED)(partial(_piece, tokenizer))


def _piece(tokenizer: tokenizers.Tokenizer, id: int) -> bytes:
    token = tokenizer.id_to_token(id)
    if token is None:  # a row of logits beyond the vocabulary
        return b""
    if _byte_level(tokenizer):
        return _bytes_of(token)
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").encode()


@lru_cache(maxsize=8)
def _byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    return bool(decoder.get("type") == "ByteLevel")


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # an added token, stored as plain text
        return token.encode()


def hidden_ids(tokenizer: tokenizers.Tokenizer, markers: Sequence[str] = ()) -> frozenset[int]:
    """Returns the ids of special tokens, but for `markers`. There are tokenizers with thousands of them, of
    which it takes milliseconds."""
    return frozenset(
        id
        for id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content not in markers
    )


def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's table (openai/gpt-2, src/encoder.py): printable bytes are themselves, others from
    U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class ByteLevelDetokenizer:
    """For byte-level BPE, where a token is a string of bytes: an incremental UTF-8 decoder does it all."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, hidden: frozenset[int] | None = None) -> None:
        """`hidden`: ids that give no text; None = those of special tokens."""
        self._piece = _pieces(tokenizer)
        self._hidden = hidden_ids(tokenizer) if hidden is None else hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        seen = [self._piece(id) for id in ids if id not in self._hidden]
        return self._utf8.decode(b"".join(seen))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder (sentencepiece, word pieces), where a token's text depends on its neighbours.

    Decodes a short window: the tokens of the last two settled stretches, so that what a decoder does at the
    start of a text (dropping a leading space) happens in a stretch that is already out. The method is that of
    vLLM's and text-generation-inference's prefix and read offsets.
    """

    _LONGEST_WINDOW = 16  # tokens; reached only where tokens give no text

    def __init__(self, tokenizer: tokenizers.Tokenizer, hidden: frozenset[int] | None = None) -> None:
        """`hidden`: ids that give no text; None = those of special tokens."""
        self._tokenizer = tokenizer
        self._hidden = hidden_ids(tokenizer) if hidden is None else hidden
        self._window: list[int] = []
        self._settled = 0  # tokens of the window whose text is out
        self._shown = 0  # characters of the window's text that are out
        self._held = 0  # last tokens in a row after which the text ended in U+FFFD

    def push(self, ids: Iterable[int]) -> str:
        return "".join(self._push(id) for id in ids if id not in self._hidden)

    def flush(self) -> str:
        return self._decode()[self._shown :]

    def _push(self, id: int) -> str:
        self._window.append(id)
        text = self._decode()
        # A character spread over byte tokens is complete after three more; beyond, the bytes are no UTF-8.
        if text.endswith(REPLACEMENT) and self._held < _UTF8_CONTINUATION_BYTES:
            self._held += 1
            return ""
        self._held = 0
        delta = text[self._shown :]
        if delta or len(self._window) >= self._LONGEST_WINDOW:
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._shown = len(self._decode())
        return delta

    def _decode(self) -> str:
        with PANICS_TOLD:  # hidden tokens are not there
            return str(self._tokenizer.decode(self._window, skip_special_tokens=False))
