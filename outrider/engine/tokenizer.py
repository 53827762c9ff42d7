"""A checkpoint's tokenizer as plain data, for those who have no model files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.engine.checkpoint import Checkpoint, locate
from outrider.engine.other_formats import pointer
from outrider.engine.sentencepiece_file import NAME as SENTENCEPIECE
from outrider.engine.sentencepiece_file import as_sentencepiece
from outrider.errors import StartupError
from outrider.wire.description import TokenizerFiles

JSON = "tokenizer.json"
TEKKEN = "tekken.json"  # Mistral's, for which transformers needs no package
EXTRA = "outrider[tokenizers]"
OTHERS = {  # what may stand in the place of tokenizer.json, whose it is, and the packages that read it
    SENTENCEPIECE: ("sentencepiece", ("sentencepiece",)),
    "tiktoken.model": ("tiktoken", ("tiktoken",)),
}


def load_tokenizer(path_or_id: str | Path) -> TokenizerFiles:
    """Reads a tokenizer. Raises StartupError where there is none that the `tokenizers` library can run."""
    checkpoint = locate(str(path_or_id), weights=False)
    folder = checkpoint.folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            trust_remote_code=False,
            mistral_format=False,  # otherwise mistral-common, where it is installed, takes tekken.json
            **checkpoint.source,
        )
    except Exception as error:  # whatever a missing, foreign or damaged file raises in there
        reason = str(error).strip().split("\n")[0]
        if checkpoint.gguf is not None:
            raise StartupError(
                f"transformers cannot read {checkpoint} ({reason}); give the model's safetensors"
            ) from None
        raise StartupError(
            _other_tokenizer(folder) or f"{checkpoint} holds no tokenizer that can be read ({reason})"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise StartupError(
            _other_tokenizer(folder)
            or f"{checkpoint} holds no fast tokenizer (tokenizer.json); convert it with transformers"
        )
    _check_there(checkpoint, tokenizer)
    if checkpoint.gguf is None and not (folder / JSON).is_file() and (folder / SENTENCEPIECE).is_file():
        as_sentencepiece(folder / SENTENCEPIECE, tokenizer.backend_tokenizer)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = _of_several(template)
    if not template:
        template = _template_beside(folder / "chat_template.json")
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


def _check_there(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises StartupError where transformers made up a tokenizer: its classes have one of a few tokens, which
    they take where they find no file."""
    names = {JSON, TEKKEN, *OTHERS, "vocab.json", *type(tokenizer).vocab_files_names.values()}
    if checkpoint.gguf is None and not any((checkpoint.folder / name).is_file() for name in names):
        raise StartupError(f"{checkpoint} holds no tokenizer: {JSON} is missing")


def _other_tokenizer(folder: Path) -> str | None:
    """Returns the sentence that names what a folder has in the place of tokenizer.json, and what to do."""
    if (folder / JSON).is_file():
        return pointer(folder / JSON)
    for name, (kind, packages) in OTHERS.items():
        missing = [package for package in packages if not _installed(package)]
        if (folder / name).is_file() and missing:
            return (
                f"{folder} has {kind}'s {name} and no tokenizer.json, which needs {' and '.join(missing)}: "
                f"pip install '{EXTRA}', or give tokenizer.json"
            )
    return None


def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _template_beside(file: Path) -> str:
    """Returns the template that multimodal checkpoints keep in a file of its own, which is their processor's.

    Raises StartupError."""
    if not file.is_file():
        return ""
    try:
        template = json.loads(file.read_bytes()).get("chat_template")
    except (ValueError, AttributeError, RecursionError):
        raise StartupError(f"{file} is damaged: it holds no JSON object") from None
    return template if isinstance(template, str) else ""


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


def _of_several(templates: Mapping[str, str]) -> str:
    """Returns one template that does what transformers does with several: one of them is for tools."""
    default = templates.get("default", "")
    with_tools = templates.get("tool_use", default)
    if with_tools == default:
        return default
    return f"{{% if tools %}}{with_tools}{{% else %}}{default}{{% endif %}}"
