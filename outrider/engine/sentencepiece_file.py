"""A tokenizer that is sentencepiece's file alone, held against sentencepiece itself.

transformers makes one of the `tokenizers` library of it, and for some models leaves out the space that
sentencepiece puts before a text: every text would begin with another token.
"""

from __future__ import annotations

import random
from operator import ne
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers

from outrider.engine.other_formats import damaged
from outrider.errors import StartupError, in_one_line

NAME = "tokenizer.model"
SPACE = "\u2581"  # as it stands in a piece
TEXTS, PIECES = 300, 5  # that are compared, and of the file's pieces in each
MOST = 0.01  # of them may differ: pieces that two ways lead to, of equal rank, are a matter of order
NORMAL = 1  # kind of a piece that is neither a control token nor a byte


def as_sentencepiece(file: Path, tokenizer: Tokenizer) -> None:
    """Lets a tokenizer give the tokens that sentencepiece gives by this file, if it is such a file.

    Raises StartupError where it does not then, and if the file is damaged."""
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    try:
        from sentencepiece import SentencePieceProcessor

        proto = SentencePieceExtractor(str(file)).proto
    except Exception:  # tiktoken's has this name, too, and was read without the package
        return
    try:
        own = SentencePieceProcessor(model_file=str(file))
        agree = _agree(own, proto, tokenizer)
        if not agree:
            _spaces(proto, tokenizer)
            agree = _agree(own, proto, tokenizer)
    except Exception as error:  # what the libraries raise for a damaged file has no common base
        raise StartupError(damaged(file, in_one_line(error))) from None
    if not agree:
        raise StartupError(
            f"{file} gives other tokens as transformers reads it than by sentencepiece; give tokenizer.json"
        )


def _agree(own: Any, proto: Any, tokenizer: Tokenizer) -> bool:
    """Returns whether sentencepiece's tokens and the tokenizer's are the same, of texts of random pieces."""
    rng = random.Random(0)
    pieces = [one.piece for one in proto.pieces if one.type == NORMAL]
    texts = ["".join(rng.choices(pieces, k=PIECES)).replace(SPACE, " ").strip(" ") for _ in range(TEXTS)]
    found = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    differing: int = sum(map(ne, found, own.encode(texts)))
    return differing <= MOST * TEXTS


def _spaces(proto: Any, tokenizer: Tokenizer) -> None:
    """Treats spaces as the file says."""
    told = proto.normalizer_spec
    before, after = list[Any](), list[Any]()
    if told.precompiled_charsmap:
        before.append(normalizers.Precompiled(told.precompiled_charsmap))
    if told.remove_extra_whitespaces:
        before += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if told.add_dummy_prefix:
        before.append(normalizers.Prepend(SPACE))
        after.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
