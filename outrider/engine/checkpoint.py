"""A checkpoint: found, looked over and fingerprinted before anything is loaded from it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from outrider.engine.gguf_header import MAGIC, MOST_LAYERS, check_header
from outrider.engine.hub import fetch
from outrider.engine.other_formats import ADAPTER, damaged, other_format
from outrider.errors import StartupError
from outrider.options.model_id import GGUF

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODULES = re.compile(
    r"(?:num|n|decoder|encoder)_(?:.+_)?(layer|expert|block)s?"
)  # of which each is an object
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder, and the GGUF file in it that holds everything, if it is one."""

    folder: Path
    gguf: str | None = None

    def __str__(self) -> str:
        return str(self.folder / self.gguf if self.gguf else self.folder)

    @property
    def source(self) -> dict[str, Any]:
        """Returns what transformers' loaders are told beside the folder."""
        return {"gguf_file": self.gguf} if self.gguf else {}


def locate(model: str, weights: bool = True) -> Checkpoint:
    """Returns the checkpoint in a folder or file, or the one of a hub id, which is fetched if it is not here;
    without its `weights`, if they are not wanted.

    Raises StartupError if there is none."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _in(path)
    if path.suffix == GGUF and path.is_file():
        return _gguf(path)
    if path.exists():
        raise StartupError(
            f"{model} is a file; give a .gguf file, the folder of a checkpoint, or a Hugging Face model id"
        )
    folder, pattern = fetch(model, weights)
    return Checkpoint(folder) if pattern is None else _gguf_in(folder, pattern) or Checkpoint(folder)


def look_over(checkpoint: Checkpoint) -> None:
    """Raises StartupError if a file that the checkpoint needs is missing, damaged or of another format."""
    if checkpoint.gguf is None:
        config_text(checkpoint.folder)
        weight_files(checkpoint.folder)


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint, each with a readable header. Raises StartupError
    otherwise."""
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        names = [SINGLE]
    elif index.is_file():
        named = _json(index).get("weight_map", {})
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise StartupError(f"{index} is damaged: its weight_map does not say which file holds a weight")
        names = sorted(set(named.values()))
    else:
        names = []
    if not names:
        raise StartupError(_without_weights(folder))
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise StartupError(f"{folder} is incomplete: {file.name}, which {INDEX} names, is missing")
        try:
            with safe_open(file, framework="pt") as weights:
                weights.keys()
        except (SafetensorError, OSError) as error:
            raise StartupError(damaged(file, error)) from None
    return files


def config_text(folder: Path) -> bytes:
    """Returns the bytes of config.json. Raises StartupError if it is missing, no JSON object or without
    measure."""
    file = folder / "config.json"
    if not file.is_file():
        raise StartupError(
            other_format(folder, folder) or f"{folder} is not a checkpoint: config.json is missing"
        )
    if (folder / ADAPTER).is_file():
        raise StartupError(
            f"{folder} holds a model and an adapter ({ADAPTER}): move that to a folder of its own, "
            "for --lora, or take it away if it is merged"
        )
    config = _json(file)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, count in part.items():
            if isinstance(count, int) and count > MOST_LAYERS and (what := MODULES.fullmatch(name)):
                raise StartupError(
                    f"{file} names more than {MOST_LAYERS} {what[1]}s, the most here: is it damaged?"
                )
    return file.read_bytes()


@contextmanager
def unchanged(what: object, files: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """Raises StartupError if the files are others at the end: then the model would not be what the
    fingerprint says. `what` they are, for people."""

    def stamps() -> list[tuple[int, ...]] | None:
        try:
            found = [file.stat() for file in files()]
        except OSError:
            return None
        return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]

    before = stamps()
    if before is not None:
        try:
            yield
        except OSError:  # one of them is gone
            if stamps() == before:
                raise
    if before is None or stamps() != before:
        raise StartupError(f"{what} was changed while it was read; start again when it is complete")


def files_of(checkpoint: Checkpoint) -> list[Path]:
    folder = checkpoint.folder
    return [folder / checkpoint.gguf] if checkpoint.gguf else [folder / "config.json", *weight_files(folder)]


def fingerprint(checkpoint: Checkpoint) -> str:
    """Returns a hex digest of the configuration and of the weights, their names and shapes included."""
    if checkpoint.gguf is not None:
        digest, files = hashlib.sha256(MAGIC), [checkpoint.folder / checkpoint.gguf]
    else:
        digest, files = hashlib.sha256(config_text(checkpoint.folder)), weight_files(checkpoint.folder)
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _in(folder: Path) -> Checkpoint:
    """Returns the checkpoint of a folder: its safetensors if it has a config.json, else its only GGUF file. A
    config.json beside a GGUF file alone tells of the model that this was made of."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return Checkpoint(folder)
    return _gguf_in(folder, f"*{GGUF}") or Checkpoint(folder)


def _gguf_in(folder: Path, pattern: str) -> Checkpoint | None:
    """Returns the only GGUF file of this pattern in a folder. Raises StartupError if there are several."""
    files = sorted(file for file in folder.glob(pattern) if not file.name.startswith("mmproj"))
    if len(files) > 1 and not PART.search(files[0].name):
        names = ", ".join(file.name for file in files)
        raise StartupError(f"{folder} holds several GGUF files ({names}); name one of them")
    return _gguf(files[0]) if files else None


def _gguf(file: Path) -> Checkpoint:
    if PART.search(file.name):
        raise StartupError(
            f"{file} is one part of a model; join the parts (llama-gguf-split --merge), and give that file"
        )
    check_header(file)
    return Checkpoint(file.parent, file.name)


def _without_weights(folder: Path) -> str:
    """Returns the sentence about a folder with a config.json and no weights that are told of."""
    parts = sorted(file.name for file in folder.glob("*.safetensors"))
    if parts and not parts[0].startswith("consolidated"):
        return (
            f"{folder} holds {parts[0]} ({len(parts)} such in all), and neither {SINGLE} nor {INDEX}, which "
            "says what is in which: fetch that"
        )
    nothing = f"{folder} holds no weights: {SINGLE} or {INDEX} is missing"
    return other_format(folder, folder) or nothing


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{file} is damaged: it is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise StartupError(f"{file} is damaged: it holds no JSON object")
    return content
