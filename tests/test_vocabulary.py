"""What tokens of two tokenizers have in common."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from outrider.errors import StartupError
from outrider.vocabulary import Vocabulary, is_special, reading
from outrider.wire.description import TokenizerFiles


def byte_level(*merged: str, end: str = "<end>") -> Vocabulary:
    """One with all bytes, and these tokens, each of two others."""
    tokens = [end, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(each.replace("+", "") for each in merged)]
    merges = [tuple(each.split("+")) for each in merged]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    return Vocabulary(TokenizerFiles("", tokenizer.to_str(), "", {"eos_token": end, "bos_token": end}))


def sentence_pieces(*pieces: str) -> Vocabulary:
    table = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    table += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    table += [(piece, -3.0 - index) for index, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(table, 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return Vocabulary(TokenizerFiles("", tokenizer.to_str(), "", {"eos_token": "</s>", "bos_token": "<s>"}))


def test_tokens_are_the_same_if_they_spell_the_same_whatever_their_names_and_ids() -> None:
    target = byte_level("t+h", "\u0120+th", "\u0120th+e")
    draft = sentence_pieces("\u2581", "\u2581the", "t", "h", "e", "\u2581th")
    found = reading(draft, target)
    for text in (b" the", b" th", b"t", b" "):
        (mine,), (theirs,) = draft.tokens(text), target.tokens(text)
        assert found.common[theirs] == mine and found.read_as[theirs] == (mine,)
    (th,) = target.tokens(b"th")
    assert th not in found.common and found.read_as[th] == tuple(draft.tokens(b"th"))
    assert list(found.common) == sorted(found.common)


def test_what_ends_a_text_is_the_same_under_any_name() -> None:
    found = reading(sentence_pieces("a"), byte_level(end="<|stop|>"))
    assert found.common[0] == 2
    assert is_special(byte_level().piece(0)) and not is_special(b"\xff")


def test_the_share_is_of_the_tokens_of_ordinary_text() -> None:
    plain, merged = byte_level(), byte_level("t+h", "h+e", "i+n")
    assert reading(plain, plain).share == reading(merged, plain).share == 1.0
    assert 0.8 < reading(plain, merged).share < 1.0


@pytest.mark.parametrize("vocabulary", [byte_level("t+h"), sentence_pieces("\u2581", "th", "t", "h")])
def test_what_a_text_is_divided_into_spells_it(vocabulary: Vocabulary) -> None:
    for text in (
        b"th",
        b" th",
        b"  th\n\n\tt",
        "naïve 😀 東京".encode(),
        "😀".encode()[1:],
        b"\xfe\x80 th",
        b"",
    ):
        assert vocabulary.spell(vocabulary.tokens(text)) == text
        sure = vocabulary.spell(vocabulary.tokens(text, sure=True))
        assert text.startswith(sure)
    end = vocabulary.piece(vocabulary.ends[0])
    assert vocabulary.spell(vocabulary.tokens(b"t" + end + b"h")) == b"t" + end + b"h"
    assert vocabulary.tokens(b"t\xffnobody\xffh") == vocabulary.tokens(b"t") + vocabulary.tokens(b"h")


def test_a_tokenizer_that_does_not_keep_its_text_is_refused_in_one_sentence() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    for text in (tokenizer.to_str(), "{}", "nonsense"):
        with pytest.raises(StartupError, match="choose a draft model that has its target's") as error:
            Vocabulary(TokenizerFiles("", text, "", {}))
        assert "\n" not in error.value.message
