"""The training text: the running interpreter's own standard library, less tests and held-out files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo.heldout import HELD_OUT, heldout_text, stdlib_root

# Tests are long and repetitive; the codecs and the help topics are tables and prose rather than code.
SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "lib-dynload",
    }
)


def is_training_file(path: Path, root: Path) -> bool:
    """Returns True if a file of the standard library below `root` belongs to the training text."""
    relative = path.relative_to(root)
    folders = relative.parts[:-1]
    if any(folder in SKIPPED_FOLDERS or folder.startswith("config-") for folder in folders):
        return False
    # _sysconfigdata records how the interpreter was built on one machine: it is no source text.
    if relative.name.startswith(("test_", "_sysconfigdata")):
        return False
    return relative.as_posix() not in HELD_OUT


def training_documents() -> list[str]:
    """Returns every training file's text, in the order of its path."""
    root = stdlib_root()
    documents = []
    for path in sorted(root.rglob("*.py")):
        if not is_training_file(path, root):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            documents.append(text)
    return documents


def heldout_documents() -> list[str]:
    """Returns the text of every held-out module, in the order of `HELD_OUT`."""
    return [heldout_text(name) for name in HELD_OUT]


def encode_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str], seed: int) -> Tensor:
    """Returns all documents as one stream of token ids [tokens], shuffled, each opened by the eos token."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    eos = tokenizer.eos_token_id
    ids: list[int] = []
    for index in order:
        ids.append(eos)
        ids.extend(tokenizer(documents[index], add_special_tokens=False)["input_ids"])
    ids.append(eos)
    return torch.tensor(ids, dtype=torch.long)


class Windows:
    """Random windows of a token stream, each part of the stream about once an epoch."""

    def __init__(self, stream: Tensor, seed: int) -> None:
        self.stream = stream
        self.generator = torch.Generator().manual_seed(seed)
        self._starts: list[int] = []
        self._length = 0

    def take(self, count: int, length: int) -> Tensor:
        """Returns `count` windows of `length` tokens: [count, length]."""
        if length != self._length:
            self._starts, self._length = [], length
        rows: list[Tensor] = []
        while len(rows) < count:
            if not self._starts:
                shift = int(torch.randint(length, (1,), generator=self.generator))
                starts = torch.arange(shift, len(self.stream) - length, length)
                shuffled = torch.randperm(len(starts), generator=self.generator)
                self._starts = starts[shuffled].tolist()
            start = self._starts.pop()
            rows.append(self.stream[start : start + length])
        return torch.stack(rows)
