"""A checkpoint's tokenizer as plain data, for those who have no model files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.engine.checkpoint import locate
from outrider.errors import StartupError
from outrider.wire.description import TokenizerFiles


def load_tokenizer(path_or_id: str | Path) -> TokenizerFiles:
    """Reads a tokenizer. Raises StartupError where there is none that the `tokenizers` library can run."""
    folder = locate(str(path_or_id))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a missing, foreign or damaged file raises in there
        reason = str(error).strip().split("\n")[0]
        raise StartupError(f"{folder} holds no tokenizer that can be read ({reason})") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise StartupError(f"{folder} holds no fast tokenizer (tokenizer.json); convert it with transformers")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    return TokenizerFiles(
        hash=table_hash(tokenizer.get_vocab()),
        json=tokenizer.backend_tokenizer.to_str(),
        chat_template=template or "",
        special_tokens={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
        },
    )


def table_hash(vocab: Mapping[str, int]) -> str:
    """sha256, in hex, of the token -> id table in the order of ids."""
    digest = hashlib.sha256()
    for token, token_id in sorted(vocab.items(), key=lambda entry: (entry[1], entry[0])):
        text = token.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()
