from __future__ import annotations

import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.detokenize import ByteLevelDetokenizer, WindowDetokenizer, detokenizer, piece
from tests.router.api import scripted


def word_pieces() -> Tokenizer:
    words = ["[UNK]", "##", "un", "##aff", "##able", "the", ",", "fox", "##es", "##'", "##s"]
    tokenizer = Tokenizer(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


BYTE_LEVEL, SENTENCEPIECE, WORD_PIECES = scripted.byte_level(), scripted.sentencepiece(), word_pieces()


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def one_by_one(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    incremental = detokenizer(tokenizer)
    return [incremental.push([id]) for id in ids] + [incremental.flush()]


def test_which_detokenizer_is_for_which_tokenizer() -> None:
    assert isinstance(detokenizer(BYTE_LEVEL), ByteLevelDetokenizer)
    assert isinstance(detokenizer(SENTENCEPIECE), WindowDetokenizer)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3)))
def test_byte_level_any_ids_in_any_order(ids: list[int]) -> None:
    assert "".join(one_by_one(BYTE_LEVEL, ids)) == whole(BYTE_LEVEL, ids)


@given(st.lists(st.sampled_from([BYTE_LEVEL.token_to_id(c) for c in "ðŁĺĢä¸ŃÿÃa"])))
def test_byte_level_broken_utf8_in_every_arrangement(ids: list[int]) -> None:
    assert "".join(one_by_one(BYTE_LEVEL, ids)) == whole(BYTE_LEVEL, ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁")))
def test_a_text_comes_back_and_no_piece_of_it_holds_a_broken_character(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    deltas = one_by_one(tokenizer, ids)
    assert "".join(deltas) == whole(tokenizer, ids) == text
    assert not any("\ufffd" in delta for delta in deltas)


# A run of byte tokens that is no UTF-8 is decoded as a whole by the library, back to its first byte, which
# may long have been shown; so bytes come as whole characters here.
_CHARACTERS = [SENTENCEPIECE.encode(c, add_special_tokens=False).ids[1:] for c in "é中😀"]
_PIECES = [[id] for id in (0, 1, 2, *range(259, SENTENCEPIECE.get_vocab_size()))]


@given(st.lists(st.sampled_from(_PIECES + _CHARACTERS)))
def test_sentencepiece_any_pieces_in_any_order(pieces: list[list[int]]) -> None:
    ids = [id for piece in pieces for id in piece]
    assert "".join(one_by_one(SENTENCEPIECE, ids)) == whole(SENTENCEPIECE, ids)


@given(st.lists(st.integers(0, WORD_PIECES.get_vocab_size() - 1)))
def test_word_pieces_any_ids_in_any_order(ids: list[int]) -> None:
    assert "".join(one_by_one(WORD_PIECES, ids)) == whole(WORD_PIECES, ids)


@given(st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1)), st.integers(1, 5))
def test_how_ids_are_grouped_does_not_matter(ids: list[int], width: int) -> None:
    incremental = detokenizer(SENTENCEPIECE)
    grouped = [incremental.push(ids[start : start + width]) for start in range(0, len(ids), width)]
    assert "".join([*grouped, incremental.flush()]) == "".join(one_by_one(SENTENCEPIECE, ids))


def test_a_character_is_held_until_it_is_whole_and_flushed_broken_at_the_end() -> None:
    ids = [BYTE_LEVEL.token_to_id(c) for c in "ðŁĺĢ"]
    assert one_by_one(BYTE_LEVEL, ids) == ["", "", "", "😀", ""]
    assert one_by_one(BYTE_LEVEL, ids[:3]) == ["", "", "", "\ufffd"]
    ids = SENTENCEPIECE.encode("😀", add_special_tokens=False).ids[1:]
    assert one_by_one(SENTENCEPIECE, ids) == ["", "", "", "😀", ""]
    assert one_by_one(SENTENCEPIECE, ids[:2]) == ["", "", "\ufffd\ufffd"]


@pytest.mark.parametrize(
    ("tokenizer", "token"),
    [(SENTENCEPIECE, "<0xFF>"), (SENTENCEPIECE, "▁"), (SENTENCEPIECE, "ox"), (WORD_PIECES, "##")],
    ids=["garbage", "space", "word", "no text at all"],
)
def test_the_window_stays_short(tokenizer: Tokenizer, token: str) -> None:
    """Cost per token is that of decoding the window, so its length is the bound."""
    incremental = WindowDetokenizer(tokenizer)
    id = tokenizer.token_to_id(token)
    lengths = []
    for _ in range(500):
        incremental.push([id])
        lengths.append(len(incremental._window))
    assert max(lengths) <= 2 * WindowDetokenizer._LONGEST_WINDOW


def test_only_a_few_tokenizers_are_remembered() -> None:
    """Each takes megabytes, and a router may see any number of models."""
    first, *others = (tokenizers.Tokenizer.from_str(BYTE_LEVEL.to_str()) for _ in range(12))
    held = sys.getrefcount(first)
    assert piece(first, 5) == piece(BYTE_LEVEL, 5)
    assert sys.getrefcount(first) > held
    for other in others:
        piece(other, 5)
    assert sys.getrefcount(first) == held
