"""A checkpoint's tokenizer as plain data, for those who have no model files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.engine.checkpoint import locate
from outrider.errors import StartupError
from outrider.wire.description import TokenizerFiles


def load_tokenizer(path_or_id: str | Path) -> TokenizerFiles:
    """Reads a tokenizer. Raises StartupError where there is none that the `tokenizers` library can run."""
    checkpoint = locate(str(path_or_id))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.folder, trust_remote_code=False, **checkpoint.source
        )
    except Exception as error:  # whatever a missing, foreign or damaged file raises in there
        reason = str(error).strip().split("\n")[0]
        raise StartupError(f"{checkpoint} holds no tokenizer that can be read ({reason})") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise StartupError(
            f"{checkpoint} holds no fast tokenizer (tokenizer.json); convert it with transformers"
        )
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    table, text = tokenizer.get_vocab(), tokenizer.backend_tokenizer.to_str()
    if checkpoint.gguf is not None:
        table, text = _without_strangers(table, text)
    return TokenizerFiles(
        hash=table_hash(table),
        json=text,
        chat_template=template or "",
        special_tokens={
            name: str(token)
            for name, token in tokenizer.special_tokens_map.items()
            if isinstance(token, str) and token in table
        },
    )


def table_hash(vocab: Mapping[str, int]) -> str:
    """sha256, in hex, of the token -> id table in the order of ids."""
    digest = hashlib.sha256()
    for token, token_id in sorted(vocab.items(), key=lambda entry: (entry[1], entry[0])):
        text = token.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def _without_strangers(table: Mapping[str, int], text: str) -> tuple[dict[str, int], str]:
    """Returns the table and the tokenizer.json without the tokens that transformers adds to a GGUF file's.

    They are those that its own class has by default, with ids that the model does not know."""
    content = json.loads(text)
    vocab = content["model"]["vocab"]
    known = vocab.keys() if isinstance(vocab, dict) else {token for token, _ in vocab}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in known]
    kept = {token: token_id for token, token_id in table.items() if token in known}
    return kept, json.dumps(content, ensure_ascii=False)
