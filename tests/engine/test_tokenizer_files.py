"""Tokenizers in the files that people have in the place of tokenizer.json."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig
from transformers.convert_slow_tokenizer import SentencePieceExtractor

from outrider.engine import tokenizer as module
from outrider.engine.loading import load_tokenizer
from outrider.errors import StartupError

TEXTS = ("def f(x):\n\treturn x + 12", "the other  thing, and the hour", "é and 漢 and \U0001f600", "  ")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
SPECIALS = ("<unk>", "<s>", "</s>", "[INST]")


def pieces() -> list[bytes]:
    """Bytes, and merged ones by their ranks."""
    merged = ["th", "the", " the", "he", "in", "an", "and", " and", "er", "on", "tion", "ti"]
    return [bytes([byte]) for byte in range(256)] + sorted((one.encode() for one in merged), key=len)


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint without its tokenizer."""
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))
    for file in folder.glob("*token*"):
        file.unlink()
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(StartupError) as refused:
        load_tokenizer(folder)
    assert "\n" not in refused.value.message
    return refused.value.message


def ids(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_str(load_tokenizer(folder).json).encode(text, add_special_tokens=False).ids)


def sentencepiece_model(kind: str, **told: Any) -> bytes:
    """Returns a file of sentencepiece's."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the other thing and the hour in the train of thought"] * 50 + list(TEXTS)),
        model_writer=model,
        vocab_size=310,
        hard_vocab_limit=False,
        model_type=kind,
        byte_fallback=True,
        character_coverage=1.0,
        minloglevel=2,
        **told,
    )
    return model.getvalue()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma"])
def test_a_sentencepiece_model_gives_its_own_tokens(
    model_type: str, prefix: bool, kind: str, copy: Path
) -> None:
    """transformers leaves out the space before a text for some of them."""
    identity = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    told = {"add_dummy_prefix": prefix, **(identity if kind == "bpe" else {})}
    content = sentencepiece_model(kind, **told)
    (copy / "tokenizer.model").write_bytes(content)
    config = AutoConfig.for_model(model_type)
    config.save_pretrained(copy)
    own = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=content)
    try:
        found = Tokenizer.from_str(load_tokenizer(copy).json)
    except StartupError as refused:  # gemma's class makes a BPE tokenizer of whatever there is
        assert (model_type, kind) == ("gemma", "unigram")
        assert "gives other tokens as transformers reads it than by sentencepiece" in refused.message
        return
    for text in TEXTS:
        tokens = found.encode(text, add_special_tokens=False).ids
        assert tokens == own.encode(text), text
        assert found.decode(tokens) == own.decode(tokens), text


@pytest.mark.parametrize("part", ["all", "charsmap", "pieces"])
def test_a_damaged_sentencepiece_model_is_called_that(part: str, copy: Path) -> None:
    """Of an empty file transformers makes a tokenizer of a few tokens."""
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    file = copy / "tokenizer.model"
    file.write_bytes(sentencepiece_model("bpe"))
    told = SentencePieceExtractor(str(file)).proto
    if part == "all":
        told.Clear()
    elif part == "charsmap":
        told.normalizer_spec.precompiled_charsmap = b"no such table"
    else:
        for piece in told.pieces:
            piece.type = piece.CONTROL
    file.write_bytes(told.SerializeToString())
    assert "tokenizer.model is damaged or cut short (" in refusal(copy)


def test_mistrals_tekken_file_gives_its_own_tokens(copy: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {piece: rank for rank, piece in enumerate(pieces())}
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for piece, rank in ranks.items()
    ]
    told = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": len(vocab) + len(SPECIALS),
            "default_num_special_tokens": len(SPECIALS),
            "version": "v7",
        },
        "vocab": vocab,
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIALS)
        ],
    }
    (copy / "tekken.json").write_text(json.dumps(told))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    own = tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert ids(copy, text) == [token + len(SPECIALS) for token in own.encode(text)], text


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
def test_a_tiktoken_file_gives_its_own_tokens(name: str, copy: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {piece: rank for rank, piece in enumerate(pieces())}
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for piece, rank in ranks.items()]
    (copy / name).write_text("\n".join(lines))
    own = tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert ids(copy, "the hour and") == own.encode("the hour and")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "tokenizer.model",
            "has sentencepiece's tokenizer.model and no tokenizer.json, which needs sentencepiece:",
        ),
        ("tiktoken.model", "has tiktoken's tiktoken.model and no tokenizer.json, which needs tiktoken:"),
    ],
)
def test_a_package_that_is_missing_is_named(
    name: str, sentence: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / name).write_bytes(b"whatever")
    monkeypatch.setattr(module, "_installed", lambda _: False)
    said = refusal(copy)
    assert sentence in said and "pip install 'outrider[tokenizers]'" in said


@pytest.mark.parametrize("told", [None, "LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_no_tokenizer_is_made_up_where_there_is_none(told: str | None, copy: Path) -> None:
    if told is not None:
        (copy / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": told}))
    assert "holds no tokenizer" in refusal(copy)


def test_a_pointer_of_git_lfs_is_called_that(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    assert "tokenizer.json is a pointer of Git LFS" in refusal(copy)
